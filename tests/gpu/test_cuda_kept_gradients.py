"""The emulator's tests of gradients and outputs that are kept, on a real GPU."""

from __future__ import annotations

import pytest

from tests.training.test_kept_gradients import (  # noqa: F401
    test_a_gradient_that_is_kept_stays_eagers,
    test_another_thread_adds_to_gradients_of_the_first_one,
    test_any_order_of_steps_and_of_what_is_kept,
    test_gradients_outlive_the_graphs,
    test_gradients_that_are_added_to_are_eagers,
    test_gradients_that_one_tensor_is_do_not_share_memory,
    test_losses_of_one_output_and_of_both_in_turn_are_eagers,
)
from tests.training.test_kept_outputs import (  # noqa: F401
    test_a_backward_does_not_write_to_the_output,
    test_an_output_may_be_written_to,
    test_an_output_outlives_the_graphs,
    test_an_output_that_is_kept_stays_eagers,
    test_an_output_that_its_backward_reads_is_a_copy,
    test_outputs_of_one_memory_are_copies,
)

pytestmark = pytest.mark.usefixtures("device_left_alone")
