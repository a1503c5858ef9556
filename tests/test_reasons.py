"""Every reason has a line for people and a value for machines."""

from __future__ import annotations

import pickle
import string

from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.serve import call_proof


class TestReason:
    def test_every_reason_has_one_line_for_people(self):
        for reason in Reason:
            assert reason.text
            assert "\n" not in reason.text
            assert len(reason.text) <= 120
            assert ": " not in reason.text  # messages put the reason's name and a colon before it
            assert set(reason.value) <= set(string.ascii_lowercase + "_")
            assert reason.value == reason.name.lower()

    def test_is_its_value_in_text_json_and_pickles(self):
        assert Reason.PADDED == "padded"
        assert f"{Reason.PADDED}" == "padded"
        assert Reason("padded") is Reason.PADDED
        assert pickle.loads(pickle.dumps(Reason.GRAD)) is Reason.GRAD

    def test_says_what_to_do(self):
        assert Reason.GRAD.text == (
            "grad mode is on and inputs or parameters require grad; "
            "call under torch.inference_mode() or torch.no_grad()"
        )

    def test_a_remedy_is_the_one_that_the_warning_has(self):
        assert Reason.PADDING_SHOWS.text.endswith("; set padding=False, or declare pad_values")
        assert "set padding=False, or declare pad_values;" in call_proof._REMEDY

    def test_wrapper_reasons_exist(self):
        needed = (
            "exact padded switched_off batch_too_large size_not_captured mixed_batch first_call warmup capture_failed "
            "training grad nested busy wrong_device ambiguous_batch_dim batch_mismatch "
            "opaque_argument unsupported_output too_many_signatures not_captured_upfront stale_too_often "
            "output_shape_unknown empty_batch"
        )
        assert set(needed.split()) <= {reason.value for reason in Reason}

    def test_names_the_command_that_says_more(self):
        assert Reason.PADDING_SHOWS.command == "simplegraph explain padding-shows"
        call = CannotBind(Reason.PADDING_SHOWS, "3 rows")
        assert call.explained == f"{Reason.PADDING_SHOWS.text} (3 rows).\n  See: simplegraph explain padding-shows"
