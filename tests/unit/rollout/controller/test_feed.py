from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from areal_lora.errors import RolloutError
from areal_lora.rollout.channel.channel_messages import GroupSums
from areal_lora.rollout.completion_client import FaultKind, GenerationFault
from areal_lora.rollout.controller.groups import MAX_STALE, MAX_TRIES, UNSERVED_S, UNSERVED_WAIT_S, Ticket
from areal_lora.rollout.ledger.ledger import GroupState, LedgerFile
from areal_lora.types import Cause, Outcome, TokenColumns, TrajectoryGroup
from tests.support.clocks import Clock
from tests.support.rollout.helpers import NAME, admit_all, episode, feed, stream


def test_nothing_is_issued_before_a_version_is_announced() -> None:
    made, _, _ = feed()
    assert made.admit() is None
    assert made.take(0) is None
    made.announce(0)
    assert len(admit_all(made)) == 4  # (eta + 1) * b


def test_oldest_issue_first_and_the_rest_waits() -> None:
    made, _, _ = feed(eta=2, b=2)
    made.announce(0)
    tickets = admit_all(made)
    for ticket in reversed(tickets[:4]):
        assert ticket.version == 0
        made.finish(ticket, episode(ticket.prompt, 0))
    lease = made.take(0)
    assert lease is not None
    assert [g.uid for g in lease.groups] == [t.prompt.uid for t in tickets[:2]]
    asked_again = made.take(0)  # now read from the file
    assert asked_again is not None
    assert (asked_again.groups, asked_again.snapshot) == (lease.groups, lease.snapshot)
    later = made.take(1)
    assert later is not None
    assert [g.uid for g in later.groups] == [t.prompt.uid for t in tickets[2:4]]
    made.commit(0)
    assert made.stats().consumed == 2
    with pytest.raises(RolloutError, match="step 0 requested, but step 2 is next"):
        made.take(0)


def test_stragglers_are_given_up_early_and_their_prompts_issued_again() -> None:
    made, ledger, expired = feed(eta=1, b=2)
    made.announce(0)
    fast, slow = admit_all(made)[:2], None
    for ticket in fast:
        made.finish(ticket, episode(ticket.prompt, 0))
    slow = next(iter(made.groups.running.values()))
    assert made.take(0) is not None
    made.announce(1)
    for ticket in admit_all(made):
        made.finish(ticket, episode(ticket.prompt, 1))
    assert not expired
    assert made.take(1) is not None  # v0 cannot be consumed at v2
    assert slow in expired
    assert ledger.drop_reasons == {"stale": 2}
    made.announce(2)
    again = admit_all(made)
    assert [t.prompt.uid for t in again[:2]] == [t.prompt.uid for t in expired]
    assert all(t.issue == 2 and t.version == 2 for t in again[:2])


def test_a_prompt_comes_too_late_at_most_so_many_times() -> None:
    made, _, _ = feed(eta=0, b=1, n=1000, version=3)
    made.announce(3)
    for issue in range(1, MAX_STALE + 1):
        [ticket] = admit_all(made)
        assert (ticket.prompt.position, ticket.issue) == (0, issue)
        made.finish(ticket, episode(ticket.prompt, 2))  # the server says it used an older version
    assert [ticket.prompt.position for ticket in admit_all(made)] == [1]
    assert made.stats().dropped == {"stale": MAX_STALE - 1, "stale_given_up": 1}
    assert made.stats().reissued == MAX_STALE - 1


def test_a_prompt_that_came_too_late_waits_for_a_version_announced_since_the_hand_over() -> None:
    made, _, _ = feed(eta=2, b=2, max_running=3)
    made.announce(0)
    slow, *quick = admit_all(made)
    for step in range(3):
        for ticket in quick:
            assert ticket.version is not None
            made.finish(ticket, episode(ticket.prompt, ticket.version))
        assert made.take(step)  # the newest version is that of the step before
        quick = admit_all(made)
        if step < 2:
            made.announce(step)
            quick += admit_all(made)
    assert made.stats().dropped == {"stale": 1}
    assert [(t.version, t.issue) for t in quick] == [(1, 1), (1, 1)], "version 1 is good for one more step"
    made.announce(2)
    [again] = admit_all(made)
    assert (again.prompt.uid, again.issue, again.version) == (slow.prompt.uid, 2, 2)


def test_groups_of_the_oldest_versions_are_taken_first() -> None:
    made, _, _ = feed(eta=2, b=2)
    made.announce(0)
    first, second, third, fourth, *rest = admit_all(made)
    for ticket in (second, third):
        made.finish(ticket, episode(ticket.prompt, 0))
    assert made.take(0)
    made.announce(1)
    made.finish(first, episode(first.prompt, 1))  # interrupted and continued
    for ticket in (fourth, rest[0]):
        made.finish(ticket, episode(ticket.prompt, 0))
    lease = made.take(1)
    assert lease is not None
    assert [finished.ticket.seq for finished in lease.finished] == [fourth.seq, rest[0].seq]


def test_a_late_answer_of_an_older_version_is_dropped_on_arrival() -> None:
    made, ledger, _ = feed(eta=0, b=1, version=3)
    made.announce(3)
    [ticket] = admit_all(made)
    made.finish(ticket, episode(ticket.prompt, 2))  # the server says it used v2
    assert ledger.drop_reasons == {"stale": 1}
    assert made.take(3) is None


def test_a_group_is_as_old_as_its_oldest_token_and_as_new_as_its_newest() -> None:
    made, _, _ = feed(eta=3, b=1, version=3)
    made.announce(3)
    [ticket, *_] = admit_all(made)
    both = [episode(ticket.prompt, version).group.trajectories[0] for version in (1, 3)]
    made.finish(ticket, replace(episode(ticket.prompt, 2), group=TrajectoryGroup(uid="", trajectories=tuple(both))))
    [ready] = made.groups.ready.values()
    assert (ready.oldest, ready.newest, made.stats().tokens_generated) == (1, 3, 4)


def test_groups_of_a_lost_future_are_not_trained_on() -> None:
    """A trainer that resumes at v1 makes another v2 than the one that was under way."""
    made, ledger, expired = feed(eta=2, b=2)
    for version in range(3):
        made.announce(version)
        tickets = admit_all(made)
        for ticket in tickets[:2]:
            made.finish(ticket, episode(ticket.prompt, version))
        if version < 2:
            assert made.take(version)
    assert [t.version for t in tickets] == [2, 2]
    made.hello(1, trainer="second")
    assert made.admit() is None
    # Two of v2 were done; the two leased at v1 are ready again, what runs at v0 and v1 goes on.
    assert ledger.drop_reasons == {"rolled_back": 2}
    assert not expired
    assert len(made.groups.ready) == 2
    made.announce(1)
    again = made.take(1)
    assert again is not None
    assert {f.newest for f in again.finished} == {1}


def test_retries_back_off_then_drop() -> None:
    made, ledger, _ = feed(b=100)
    made.announce(0)
    ticket = made.admit()
    assert ticket is not None
    delays = []
    for _ in range(MAX_TRIES):
        made.begin(ticket)
        delays.append(made.retry(ticket, GenerationFault(FaultKind.SERVER_ERROR, "HTTP 500")))
    assert delays[:3] == [0.1, 0.2, 0.4]
    assert delays[-1] is None
    assert ledger.drop_reasons == {"server_error": 1}
    assert made.stats().retried == {"server_error": MAX_TRIES - 1}
    assert made.note == f"server_error: {MAX_TRIES - 1} retried, 1 dropped, last: HTTP 500"


def test_a_rollout_plane_that_only_fails_ends_the_run() -> None:
    made, _, _ = feed(b=4)

    def lose_everything() -> None:
        made.announce(0)
        for _ in range(1000):
            ticket = made.admit()
            assert ticket is not None
            made.begin(ticket)
            made.retry(ticket, GenerationFault(FaultKind.REJECTED, "HTTP 400"))

    with pytest.raises(RolloutError, match=r"16 groups in a row .* HTTP 400"):
        lose_everything()


def test_retries_ask_for_the_newest_version() -> None:
    made, _, _ = feed()
    made.announce(0)
    ticket = made.admit()
    assert ticket is not None
    made.begin(ticket)
    made.retry(ticket, GenerationFault(FaultKind.RETIRED, ""))
    for other in admit_all(made)[:2]:
        made.finish(other, episode(other.prompt, 0))
    assert made.take(0)
    made.announce(1)
    ref = made.begin(ticket)
    assert ref is not None
    assert str(ref) == f"{NAME}@v1"


def test_too_long_prompts_are_dropped_with_a_reason() -> None:
    made, ledger, _ = feed(n=100, b=50, eta=1, prompts=stream(100, max_prompt_tokens=4))  # "10+1=" has five
    made.announce(0)
    tickets = admit_all(made)
    assert len(tickets) == 100
    assert all(len(t.prompt.token_ids) == 4 for t in tickets)
    assert ledger.drop_reasons["prompt_too_long"] > 100


def test_concurrency_and_the_last_step_bound_admission() -> None:
    made, _, _ = feed(eta=8, b=2, max_running=3)
    made.announce(0)
    assert len(admit_all(made)) == 3
    made, _, _ = feed(eta=8, b=2, steps=2)
    made.announce(0)
    assert len(admit_all(made)) == 4


def test_idle_time_and_tokens() -> None:
    clock = Clock()
    made, _, _ = feed(eta=0, b=1, clock=clock)
    made.announce(0)
    clock.now = 1.0
    [ticket] = admit_all(made)
    clock.now = 3.0
    made.finish(ticket, episode(ticket.prompt, 0, n=3))
    clock.now = 3.5
    stats = made.stats()
    assert (stats.idle_s, stats.tokens_generated) == (1.5, 6)


def test_versions_do_not_go_back() -> None:
    made, _, _ = feed(version=3)
    made.announce(3)
    with pytest.raises(RolloutError, match="announced after v3"):
        made.announce(2)


@pytest.mark.parametrize("kind", [FaultKind.CONNECTION, FaultKind.RETIRED])
def test_no_prompt_is_lost_while_the_only_server_restarts(kind: FaultKind) -> None:
    """Under the same URL it refuses connections, then answers 404 until it has rejoined: here after five hours."""
    clock = Clock()
    made, ledger, _ = feed(clock=clock)
    made.announce(0)
    [ticket, *_] = admit_all(made)
    while clock.now < 5 * 3600:
        assert made.retry(ticket, GenerationFault(kind, "gone")) == min(max(UNSERVED_WAIT_S, clock.now / 2), 5.0)
        made.begin(ticket)
        clock.now += 60.0
    assert made.finish(ticket, episode(ticket.prompt, 0))
    assert (ledger.drop_reasons, ticket.failed, ticket.resampled) == ({}, 0, 0)


def test_dropped_groups_have_nothing_that_only_training_needs() -> None:
    made, _, _ = feed(eta=0, b=2, drop_uniform=True)
    made.announce(0)
    for ticket in admit_all(made):
        group = (answered := episode(ticket.prompt, 0)).group
        columns = [
            TokenColumns(
                **{name: getattr(t.columns, name) for name in ("token_ids", "logprobs", "versions")},
                routes=b"r" * 384 * len(t.columns),
                teacher=bytes(4 * len(t.columns)),
                n_kept=b"\1\0" * len(t.columns),
                kept=bytes(4 * len(t.columns)),
                log_mass=bytes(4 * len(t.columns)),
            )
            for t in group.trajectories
        ]
        routed = tuple(replace(t, columns=c) for t, c in zip(group.trajectories, columns, strict=True))
        made.finish(ticket, replace(answered, group=replace(group, trajectories=routed)))
    dropped = made.take_dropped()
    assert len(dropped) == 2
    assert made.take_dropped() == ()
    for t in (t for each in dropped for t in each.group.trajectories):
        assert sum(map(len, msgspec.structs.astuple(t.columns))) == 8 * len(t.columns) + len(t.columns.versions)
        assert t.columns.n_sampled > 0


def test_groups_without_variance_are_dropped_and_further_prompts_issued() -> None:
    made, ledger, _ = feed(eta=0, b=2, drop_uniform=True)
    made.announce(0)
    tickets = admit_all(made)
    for ticket in tickets:
        made.finish(ticket, episode(ticket.prompt, 0))  # every reward is 1
    assert ledger.drop_reasons == {"no_variance": 2}
    assert made.take(0) is None
    assert [t.prompt.position for t in admit_all(made)] == [2, 3]
    assert made.stats().reissued == 0
    assert "the last 2 groups had equal rewards" in made.note


@pytest.mark.parametrize(("eta", "issued"), [(0, 15), (1, 47), (2, 157)])
def test_as_many_groups_run_as_the_share_that_is_kept_makes_batches_of(eta: int, issued: int) -> None:
    """8 of 32 were kept. With staleness 2 the 40 missing of three batches are a quarter of 157, rounded up; else half.

    The staleness at the hand-over is bounded as ever; another controller starts without a share.
    """
    made, _, _ = feed(eta=eta, b=16, n=400, drop_uniform=True)
    made.announce(0)

    def answer(ticket: Ticket, *, kept: bool) -> None:
        found = episode(ticket.prompt, 0)
        rewarded = tuple(replace(t, reward=float(i * kept)) for i, t in enumerate(found.group.trajectories))
        assert made.finish(ticket, replace(found, group=replace(found.group, trajectories=rewarded)))

    answered = 0
    while answered < 32:
        admit_all(made)
        for ticket in list(made.groups.running.values())[: 32 - answered]:
            answer(ticket, kept=answered % 4 == 0)
            answered += 1
    admit_all(made)
    assert (made.stats().ready, made.stats().running) == (8, issued)
    for ticket in list(made.groups.running.values()):
        answer(ticket, kept=True)
    for step in range(eta + 1):
        assert made.take(step)
    assert made.take(eta + 1) is None, "what is left is stale"
    another, _, _ = feed(eta=eta, b=16, n=400, drop_uniform=True)
    another.announce(0)
    assert len(admit_all(another)) == 16 * (eta + 1)


def test_what_was_sampled_counts_every_group_answered_since_the_batch_before() -> None:
    """Two of the three groups of step 0 have equal rewards; step 1 has one group that its trainer waits for."""
    made, _, _ = feed(eta=0, b=1, n=20, drop_uniform=True)
    made.announce(0)
    for rewards in ((1.0, 1.0), (0.0, 0.0), (1.0, 0.0)):
        [ticket] = admit_all(made)
        answered = episode(ticket.prompt, 0)
        pairs = zip(answered.group.trajectories, rewards, strict=True)
        trajectories = tuple(replace(t, reward=reward, correct=reward == 1.0) for t, reward in pairs)
        made.finish(ticket, replace(answered, group=TrajectoryGroup(uid="", trajectories=trajectories)))
        assert not made.finish(ticket, answered), "a repeated answer is not counted"
    expected = GroupSums(groups=3, equal=2, judged=3, all_right=1, all_wrong=1, samples=6, reward=3.0)
    for _ in range(2):
        assert made.take(0)
        assert made.sampled == expected, "a batch that is served again has the same"
    made.announce(1)
    [ticket] = admit_all(made)
    one = episode(ticket.prompt, 1, n=3).group.trajectories
    conversations = (replace(one[0], reward=0.5), *(replace(t, sample=1, correct=True) for t in one[1:]))
    made.finish(ticket, replace(episode(ticket.prompt, 1), group=TrajectoryGroup(uid="", trajectories=conversations)))
    assert made.take(1)
    assert made.sampled == GroupSums(groups=1, samples=2, reward=1.5)


def test_a_given_answer_is_not_sampled() -> None:
    made, _, _ = feed(eta=0, b=1)
    made.announce(0)
    [ticket] = admit_all(made)
    first, second = episode(ticket.prompt, 0).group.trajectories
    given = TrajectoryGroup(uid="", trajectories=(replace(first, given=True), second))
    made.finish(ticket, replace(episode(ticket.prompt, 0), group=given))
    assert made.take(0)
    assert made.sampled == GroupSums()


def test_a_time_without_servers_ends_when_one_answers() -> None:
    """Two short ones far apart, with no group finished between them, are not one long one."""
    clock = Clock()
    made, ledger, _ = feed(eta=0, b=2, clock=clock)
    made.announce(0)
    one, two = admit_all(made)
    assert made.retry(one, GenerationFault(FaultKind.CONNECTION, "refused")) == UNSERVED_WAIT_S
    assert made.retry(two, GenerationFault(FaultKind.SERVER_ERROR, "HTTP 503")) is not None
    clock.now += 2 * UNSERVED_S
    for _ in range(2 * MAX_TRIES):
        made.begin(one)
        assert made.retry(one, GenerationFault(FaultKind.CONNECTION, "refused")) == UNSERVED_WAIT_S
    assert one.failed == 0
    assert ledger.drop_reasons == {}
    assert "connection: 17 retried, 0 dropped, last: refused" in made.note


def test_groups_wait_for_an_agents_server_that_starts_late() -> None:
    """16 groups of an agent whose tools refuse connections for 25 s: none is dropped, and the pauses grow."""
    clock = Clock()
    made, ledger, _ = feed(eta=3, b=4, clock=clock)
    made.announce(0)
    due = dict.fromkeys((ticket.seq for ticket in admit_all(made)), 0.0)
    refused = GenerationFault(FaultKind.AGENT, "ConnectionRefusedError", cause=Cause.UNREACHABLE)
    tickets, tries = dict(made.groups.running), 0
    assert len(tickets) == 16
    while (now := min(due.values())) < 25.0:
        clock.now = now
        seq = min(due, key=lambda seq: due[seq])
        if tries >= 16:
            made.begin(tickets[seq])
        wait_s = made.retry(tickets[seq], refused)
        assert wait_s is not None, ledger.drop_reasons
        due[seq], tries = now + wait_s, tries + 1
    assert tries < 16 * 20
    for ticket in tickets.values():
        made.begin(ticket)
        assert made.finish(ticket, episode(ticket.prompt, 0))
    assert (made.stats().ready, ledger.drop_reasons) == (16, {})


def test_a_second_answer_is_counted_and_ignored() -> None:
    made, _, _ = feed()
    made.announce(0)
    [ticket, *_] = admit_all(made)
    assert made.finish(ticket, episode(ticket.prompt, 0))
    assert not made.finish(ticket, episode(ticket.prompt, 0))
    assert made.retry(ticket, GenerationFault(FaultKind.CONNECTION, "too late")) is None
    stats = made.stats()
    assert (stats.late, stats.ready) == (2, 1)


def test_tokens_of_a_version_that_may_be_lost_are_not_trained_on_although_its_number_was_made_again() -> None:
    """A request outlives a trainer, and continues on its newest version, or on that of the next one."""
    made, ledger, _ = feed(eta=2, b=2)
    made.announce(0)
    over, common, *rest = admit_all(made)
    for ticket in rest[:2]:
        made.finish(ticket, episode(ticket.prompt, 0))
    made.hello(0, trainer="second")
    made.announce(0)
    assert made.take(0)
    made.announce(1)
    made.finish(over, episode(over.prompt, 1))
    made.finish(common, episode(common.prompt, 0))
    assert ledger.drop_reasons == {"rolled_back": 1}
    again = next(ticket for ticket in admit_all(made) if ticket.prompt == over.prompt)
    assert (again.issue, again.version) == (2, 1)
    made.finish(again, episode(again.prompt, 1))
    assert ledger.drop_reasons == {"rolled_back": 1}
    lease = made.take(1)
    assert lease is not None
    assert sorted(f.newest for f in lease.finished) == [0, 1]


def test_an_answer_from_before_a_rebuilt_ledger_is_refused() -> None:
    """The snapshot issues the same prompts under the same numbers; a workflow may ignore that it was cancelled."""
    other, _, _ = feed(eta=1, b=2)
    other.announce(0)
    for ticket in admit_all(other)[:2]:
        other.finish(ticket, episode(ticket.prompt, 0))
    lease = other.take(0)
    assert lease is not None
    made, _, _ = feed(eta=1, b=2)
    made.announce(0)
    old = admit_all(made)
    made.hello(1, trainer="second", snapshot=lease.snapshot)
    made.announce(1)
    new = {ticket.seq: ticket for ticket in admit_all(made)}
    late = [ticket for ticket in old if ticket.seq in new]
    assert [(t.prompt.uid, t.issue) for t in late] == [(new[t.seq].prompt.uid, new[t.seq].issue) for t in late]
    assert late
    for ticket in late:
        assert not made.finish(ticket, episode(ticket.prompt, 0))
        assert made.finish(new[ticket.seq], episode(ticket.prompt, 1))
    assert made.stats().late == len(late)


def test_a_request_that_outlives_its_lease_is_asked_again() -> None:
    clock = Clock()
    made, _, expired = feed(eta=0, b=2, clock=clock, lease_s=10.0)
    made.announce(0)
    slow, fast = admit_all(made)
    clock.now = 9.0
    made.expire_overdue()
    assert not expired
    made.finish(fast, episode(fast.prompt, 0))
    clock.now = 11.0
    made.expire_overdue()
    assert expired == [slow]
    assert not made.finish(slow, episode(slow.prompt, 0)), "its answer comes too late"
    [again] = admit_all(made)
    assert (again.seq, again.issue, again.failed, again.resampled) == (slow.seq, 1, 1, 0)
    assert made.stats().retried == {"lease_expired": 1}


def test_a_restarted_controller_goes_on_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    file = LedgerFile(path, "t")
    made, _, _ = feed(eta=1, b=2, file=file)
    made.announce(0)
    tickets = admit_all(made)
    for ticket in tickets[:3]:
        made.finish(ticket, episode(ticket.prompt, 0))
    lease = made.take(0)
    assert lease is not None
    file._db.close()  # what was not flushed is lost
    again, _, _ = feed(eta=1, b=2, file=LedgerFile(path, "t"), version=None)
    again.hello(0, trainer="first")  # the batch may not have reached it
    assert (again.stats().ready, len(again.groups.waiting), again.stats().leased) == (1, 1, 2)
    same = again.take(0)
    assert same is not None
    assert (same.groups, same.snapshot) == (lease.groups, lease.snapshot)
    again.announce(0)
    [asked] = admit_all(again)
    assert (asked.seq, asked.prompt.uid, asked.issue) == (tickets[3].seq, tickets[3].prompt.uid, 1)


def test_a_resumed_trainer_gets_the_same_groups_for_the_step_it_lost() -> None:
    made, _, _ = feed(eta=0, b=2)
    made.announce(0)
    for ticket in admit_all(made):
        made.finish(ticket, episode(ticket.prompt, 0))
    first = made.take(0)
    assert first is not None
    made.hello(0, trainer="second")
    made.announce(0)
    assert made.admit() is None
    again = made.take(0)
    assert again is not None
    assert (again.groups, again.snapshot) == (first.groups, first.snapshot)


def test_a_commit_that_did_not_arrive_is_made_up_for() -> None:
    made, ledger, _ = feed(eta=0, b=2)
    made.announce(0)
    for ticket in admit_all(made):
        made.finish(ticket, episode(ticket.prompt, 0))
    assert made.take(0)
    made.hello(1, trainer="second")  # its checkpoint contains step 0
    assert ledger.counts[GroupState.CONSUMED] == 2
    with pytest.raises(RolloutError, match="step 0 requested, but step 1 is next"):
        made.take(0)


def test_another_batch_size_at_a_resume_loses_and_repeats_no_prompt() -> None:
    file = LedgerFile(":memory:", "t")
    made, _, _ = feed(eta=1, b=2, file=file)
    made.announce(0)
    for ticket in admit_all(made):
        made.finish(ticket, episode(ticket.prompt, 0))
    first = made.take(0)
    assert first is not None
    again, _, _ = feed(eta=1, b=3, file=file, version=None)
    again.hello(1, trainer="second")
    again.announce(1)
    for ticket in admit_all(again):
        again.finish(ticket, episode(ticket.prompt, 1))
    second = again.take(1)
    assert second is not None
    assert [f.ticket.prompt.position for f in first.finished] == [0, 1]
    assert [f.ticket.prompt.position for f in second.finished] == [2, 3, 4]


def test_groups_that_were_dropped_are_reported_once_with_reason_and_answers() -> None:
    made, _, _ = feed(eta=0, b=3, drop_uniform=True)
    made.announce(0)
    uniform, failed, unscored = admit_all(made)
    made.finish(uniform, episode(uniform.prompt, 0))
    made.retry(failed, GenerationFault(FaultKind.REJECTED, "HTTP 400"))
    fault = GenerationFault(FaultKind.REJECTED, "no rule")
    made.retry(unscored, fault, episode(unscored.prompt, 0))
    for _ in range(2):
        wait_s = made.retry(unscored, fault)
        assert wait_s is None, "dropped before"
    first, second, third = made.take_dropped()
    assert [each.reason for each in (first, second, third)] == [
        "no_variance",
        "rejected: HTTP 400",
        "rejected: no rule",
    ]
    assert (first.group.uid, first.text.answers, first.text.prompt) == (
        uniform.prompt.uid,
        ("x", "x"),
        uniform.prompt.text,
    )
    [prompt] = second.group.trajectories
    assert (prompt.token_ids, prompt.loss_mask) == (failed.prompt.token_ids, [0] * len(failed.prompt.token_ids))
    assert prompt.outcome is not Outcome.OK
    assert len(third.group.trajectories) == 2
    assert made.take_dropped() == ()
    again = admit_all(made)
    for ticket in again * 2:
        made.finish(ticket, episode(ticket.prompt, 0))
    assert len(made.take_dropped()) == 3, "at most a step's worth, the last ones"


def test_a_ready_group_that_became_too_old_is_reported() -> None:
    made, _, _ = feed(eta=0, b=1, max_running=2)
    made.announce(0)
    tickets = admit_all(made)
    for ticket in tickets:
        made.finish(ticket, episode(ticket.prompt, 0))
    assert made.take(0)
    made.announce(1)
    [ticket] = admit_all(made)
    made.finish(ticket, episode(ticket.prompt, 0))  # the server says it used an older version
    [lost] = made.take_dropped()
    assert (lost.reason, lost.group.uid) == ("stale", ticket.prompt.uid)


def test_a_group_that_the_ledger_cannot_keep_is_dropped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    made, ledger, _ = feed(b=2)
    made.announce(0)
    whole, large = admit_all(made)[:2]
    monkeypatch.setattr("areal_lora.rollout.controller.groups.MAX_BYTES", 10_000)
    made.finish(whole, episode(whole.prompt, 0))
    made.finish(large, replace(episode(large.prompt, 0), texts=("x" * 10_000,) * 2))
    assert (made.stats().ready, made.stats().dropped) == (1, {"too_large": 1})
    assert "too_large: 0 retried, 1 dropped, last: a group exceeds 10,000 bytes (fix: fewer" in made.note
    ledger.check(live=len(made.groups.ready) + len(made.groups.running))


@pytest.mark.parametrize(
    ("before", "now", "ready"), [("T 1", "T 1", 2), ("T 1", "T 0.7", 0), ("", "T 0.7", 2), ("T 1", "", 2)]
)
@pytest.mark.parametrize("version", [0, 1])
def test_groups_that_are_sampled_otherwise_since_a_resume_are_issued_again(
    before: str, now: str, ready: int, version: int
) -> None:
    file = LedgerFile(":memory:", "t")
    made, _, _ = feed(b=2, file=file, sampled=before)
    made.announce(0)
    for ticket in admit_all(made):
        made.finish(ticket, episode(ticket.prompt, 0))
    lease = made.take(0)
    assert lease is not None
    again, ledger, _ = feed(b=2, file=file, sampled=now, version=None)
    again.hello(version, trainer="second", snapshot=lease.snapshot if version else b"")
    leased = 0 if version or not ready else 2  # of the step that a trainer at version 0 takes again
    assert (again.stats().ready, again.stats().leased) == (ready + leased, 0)
    assert ledger.head.sampled == (now or before)
    again.announce(version)
    for ticket in admit_all(again):
        again.finish(ticket, episode(ticket.prompt, version))
    following = again.take(version)
    assert following is not None
    assert [f.ticket.prompt.position for f in following.finished] == [2 * version, 2 * version + 1]
    assert {f.newest for f in following.finished} == ({0} if ready else {version})


def test_an_adapter_that_leaves_and_returns_loses_and_repeats_no_prompt() -> None:
    file = LedgerFile(":memory:", "t")
    made, ledger, _ = feed(eta=2, b=2, file=file)
    made.announce(0)
    running, *answered = admit_all(made)
    for ticket in answered:
        made.finish(ticket, episode(ticket.prompt, 0))
    first = made.take(0)
    assert first is not None
    made.commit(0)
    made.end(leaves=True)
    assert file.execute("SELECT COUNT(*) FROM trajectories").fetchone() == (0,)
    assert ledger.counts[GroupState.ISSUED] == len(answered) + 1 - 2
    ledger.close()
    assert file.ledgers == {}
    again, _, _ = feed(eta=2, b=2, file=file, version=None)
    again.hello(1, trainer="second", snapshot=first.snapshot)
    again.announce(1)
    for ticket in admit_all(again):
        assert again.finish(ticket, episode(ticket.prompt, 1))
    positions = [f.ticket.prompt.position for f in first.finished]
    for step in range(1, 3):
        lease = again.take(step)
        assert lease is not None
        assert {f.newest for f in lease.finished} == {1}
        positions += [f.ticket.prompt.position for f in lease.finished]
        again.commit(step)
    assert sorted(positions) == [0, 1, 2, 3, 4, 5]
    assert running.prompt.position == 0


@pytest.mark.parametrize("trainer", ["first", "second"])
@pytest.mark.parametrize("version", range(5))
def test_an_adapter_that_leaves_keeps_no_leased_trajectories_and_returns_from_any_checkpoint(
    version: int, trainer: str
) -> None:
    """Steps 0 to 3 were handed over and 0 and 1 committed: versions 3 and 4 have commits that did not arrive."""
    file = LedgerFile(":memory:", "t")
    made, ledger, _ = feed(eta=2, b=2, file=file)
    leases = []
    for step in range(4):
        made.announce(step)
        for ticket in admit_all(made):
            made.finish(ticket, episode(ticket.prompt, step))
        leases.append(made.take(step))
    made.commit(1)
    assert ledger.counts[GroupState.LEASED] == 4
    made.end(leaves=True)
    assert file.execute("SELECT COUNT(*) FROM trajectories").fetchone() == (0,)
    assert ledger.counts[GroupState.LEASED] == len(made.groups.leases) == 0
    ledger.close()
    again, _, _ = feed(eta=2, b=2, file=file, version=None)
    learned = [lease for lease in leases[:version] if lease is not None]
    again.hello(version, trainer=trainer, snapshot=learned[-1].snapshot if learned else b"")
    positions = [finished.ticket.prompt.position for lease in learned for finished in lease.finished]
    for step in range(version, 10):
        again.announce(step)
        for ticket in admit_all(again):
            assert again.finish(ticket, episode(ticket.prompt, step))
        lease = again.take(step)
        assert lease is not None
        positions += [finished.ticket.prompt.position for finished in lease.finished]
        again.commit(step)
    assert len(positions) == len(set(positions)) == 20, "no prompt twice"
    assert {*range(8)} <= {*positions}, "none of those handed over is lost"
