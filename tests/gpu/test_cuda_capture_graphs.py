"""The emulator's tests of what captures up front leave in memory and in Python, on a real GPU."""

from __future__ import annotations

import pytest

from tests.module.test_capture_graphs import (  # noqa: F401
    test_a_cache_outside_of_the_module_that_only_a_rehearsal_fills_stays_filled,
    test_captures_in_gaps_run_once_in_memory_that_the_module_does_not_hold,
    test_memory_that_is_too_much_to_copy_keeps_nothing_else_from_being_put_back,
    test_memory_that_the_module_does_not_hold_sees_one_run_too,
    test_one_size_that_the_module_cannot_run_fails_alone,
    test_state_after_capture_graphs_is_that_of_one_run_on_the_examples_in_their_order,
)
from tests.module.test_filled_once import (  # noqa: F401
    module,
    place,
    test_a_check_leaves_a_module_as_it_was,
    test_captures_at_first_calls_note_nothing,
    test_captures_of_an_engine_note_nothing,
    test_captures_up_front_note_nothing_and_name_the_place,
    test_eager_calls_between_captures_and_replays_fill_the_memory,
    test_places_that_are_given_out_by_size_stay,
    test_runs_that_learn_about_lengths_note_nothing,
    test_second_captures_and_runs_of_their_own_note_nothing,
    test_what_another_thread_was_given_meanwhile_stays,
)

pytestmark = [pytest.mark.usefixtures("device_left_alone", "no_grad"), pytest.mark.proofs]
