"""The emulator's tests of gradients in a graph's memory, on a real GPU."""

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
)

pytestmark = pytest.mark.usefixtures("device_left_alone")
