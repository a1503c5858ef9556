"""The emulator's tests of gradients and outputs in a graph's memory, on a real GPU."""

from __future__ import annotations

import pytest

from tests.training.test_handed_gradients import (  # noqa: F401
    test_a_gradient_that_is_kept_stays_eagers,
    test_an_ordinary_loop_copies_no_gradient,
    test_another_thread_does_not_move_what_the_first_one_adds_to,
    test_any_order_of_steps_and_of_what_is_kept,
    test_gradients_are_copies_where_torch_does_not_count_uses,
    test_gradients_outlive_the_graphs,
    test_gradients_that_are_added_to_leave_the_graphs_memory_first,
    test_gradients_that_one_tensor_is_do_not_share_memory,
    test_losses_of_one_output_and_of_both_in_turn_copy_no_gradient,
)
from tests.training.test_handed_outputs import (  # noqa: F401
    test_a_backward_does_not_write_to_the_output,
    test_a_loop_that_drops_outputs_copies_none,
    test_a_loop_whose_variable_keeps_the_last_output_runs_no_call_more_eagerly,
    test_an_output_may_be_written_to,
    test_an_output_outlives_the_graphs,
    test_an_output_that_is_kept_stays_eagers,
    test_an_output_that_its_backward_reads_is_a_copy,
    test_outputs_of_one_memory_are_copies,
)

pytestmark = pytest.mark.usefixtures("device_left_alone")
