"""Figures derived from one record."""

from tests.support.obs.records import step_record


def test_the_trainers_idle_fraction_is_what_it_waited_for() -> None:
    step = step_record(
        step=0,
        version=0,
        time_s=1.0,
        step_s=4.0,
        wait_batch_s=1.0,
        checkpoint_join_s=0.5,
        publish_join_s=0.5,
        train_s=1.5,
        publish_pack_s=0.5,
    )
    assert step.trainer_idle == 0.5
    assert step_record(step=0, version=0, time_s=1.0).trainer_idle is None
