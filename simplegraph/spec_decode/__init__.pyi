from simplegraph.spec_decode.acceptance import Accepted as Accepted
from simplegraph.spec_decode.acceptance import greedy_accept as greedy_accept
from simplegraph.spec_decode.acceptance import rejection_sample as rejection_sample
from simplegraph.spec_decode.acceptance import target_probabilities as target_probabilities
from simplegraph.spec_decode.advance import advance_step as advance_step
from simplegraph.spec_decode.buffers import DraftModel as DraftModel
from simplegraph.spec_decode.buffers import Proposals as Proposals
from simplegraph.spec_decode.eagle import EagleDrafter as EagleDrafter
