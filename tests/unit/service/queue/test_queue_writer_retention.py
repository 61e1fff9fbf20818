"""What is removed when no one needs it, and what is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from areal_lora.errors import RequestError
from areal_lora.operations.protocol import (
    Datum,
    LoadState,
    Loss,
    OperationFailure,
    OptimStep,
    Pass,
    PassResult,
    Poison,
    PublishResult,
    StateResult,
    StepResult,
)
from areal_lora.service.queue import client_sessions, queue_writer, sequencer
from areal_lora.service.queue.client_sessions import (
    AdapterRequest,
    end_session,
    insert_model,
    insert_snapshot,
    open_sampler,
    served,
    unload,
)
from areal_lora.service.queue.queue_rows import SavedState
from areal_lora.service.queue.requests import ActionResult, CreateModel, Load, Save, Train
from areal_lora.service.queue.sequencer import completed, durable, expected, look, submit, to_send
from tests.support.service.ledger import LORA, QUOTA, Ledger

PASS = Train(what=Pass(data=(), loss=Loss.DRO))
STEP = Train(what=OptimStep(lr=1.0))
SCORED, KEPT = PassResult(logprobs=(b"x" * 1000,), loss=0.0), StateResult(step=1, n_bytes=9)
STEPPED = StepResult(step=1, grad_norm=1.0, skipped=False)


class World:
    """One model, and outcomes as a test gives them."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.model, self.adapter = self.ledger.model()
        self.ledger.change(lambda tx: expected(tx, self.adapter, 1))
        self.seq = self.number = 0

    def submit(self, action: Train | Save | Load) -> str:
        self.seq += 1
        return self.ledger.change(lambda tx: submit(tx, "acme", self.model, self.seq, "f", action))

    def done(self, *outcomes: PassResult | StepResult | StateResult | PublishResult | OperationFailure) -> None:
        for outcome in outcomes:
            self.number += 1
            self.ledger.change(lambda tx, o=outcome: completed(tx, self.adapter, self.number, o))

    def durable(self) -> None:
        """A checkpoint has everything so far."""
        self.ledger.change(lambda tx: durable(tx, self.adapter, self.number))

    def count(self, sql: str) -> int:
        return int(self.ledger.db.execute(f"SELECT COUNT(*) FROM {sql}").fetchone()[0])

    def forget(self, *fetched: str) -> None:
        self.ledger.change(lambda tx: queue_writer.forget(tx, set(fetched)))


def test_data_are_kept_until_a_checkpoint_has_them() -> None:
    it = World()
    it.submit(PASS)
    it.submit(PASS)
    it.done(SCORED, SCORED)
    it.ledger.now_s += 10 * queue_writer.ANSWERED_S
    it.forget()
    again = it.ledger.change(lambda tx: to_send(tx, it.adapter, 1))
    assert [operation.what for operation in again] == [PASS.what, PASS.what], "the trainer may action for them again"
    it.submit(STEP)
    it.done(STEPPED)
    assert it.count("client_operations") == 3
    again = it.ledger.change(lambda tx: to_send(tx, it.adapter, 1))
    assert [operation.what for operation in again] == [PASS.what, PASS.what, STEP.what], "a step that was answered, too"
    it.durable()
    assert (
        it.count("client_operations")
        == it.count("requests WHERE action IS NOT NULL AND owner = '" + it.model + "'")
        == 0
    )


def test_what_a_checkpoint_has_and_has_no_outcome_is_lost() -> None:
    it = World()
    waits = it.submit(PASS)
    it.number = 1
    it.durable()
    answer, _ = it.ledger.change(lambda tx: look(tx, "acme", waits))
    assert isinstance(answer, OperationFailure)
    assert "has lost" in answer.reason


def test_an_adapter_that_has_failed_keeps_so_many_failures_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequencer, "KEPT_FAILED", 3)
    it = World()
    for kept in (1, 2, 3, 0):
        it.submit(PASS)
        it.ledger.change(lambda tx: queue_writer.follow(tx, {it.adapter: "no disk"}))
        assert it.count("client_operations") == kept
    it.submit(PASS)
    assert it.ledger.change(lambda tx: expected(tx, it.adapter, 5))


def test_of_a_failed_pass_no_data_are_kept() -> None:
    it = World()
    it.submit(PASS)
    it.submit(STEP)
    it.done(OperationFailure(reason="bad", by_client=True), OperationFailure(reason="bad", by_client=True))
    assert it.count("requests WHERE n_bytes > 0 AND action IS NOT NULL AND seq > 0") == 0
    it.submit(PASS)
    it.submit(STEP)
    it.done(SCORED, STEPPED)
    it.durable()
    assert it.count("client_operations") == 0


def test_answers_are_kept_for_an_hour_after_they_were_fetched_and_else_for_a_day() -> None:
    it = World()
    first, second = it.submit(PASS), it.submit(STEP)
    it.done(SCORED, STEPPED)
    it.durable()
    it.forget(first)
    it.ledger.now_s += queue_writer.FETCHED_S + 1
    it.forget()
    with pytest.raises(RequestError):
        it.ledger.change(lambda tx: look(tx, "acme", first))
    assert it.ledger.change(lambda tx: look(tx, "acme", second))[0] == STEPPED
    with pytest.raises(RequestError, match="answered long ago"):
        it.ledger.change(lambda tx: submit(tx, "acme", it.model, 1, "f", PASS))
    it.ledger.now_s += queue_writer.ANSWERED_S
    it.forget()
    assert it.count("requests") == 0


def test_the_oldest_answers_of_a_tenant_leave_when_they_are_too_long_together() -> None:
    it = World()
    requests = []
    for _ in range(5):
        requests.append(it.submit(PASS))
        it.submit(STEP)
        it.done(SCORED, STEPPED)
        it.durable()
        it.ledger.now_s += 1
    it.ledger.change(lambda tx: queue_writer._shorten(tx, "acme", 2500))
    kept = [each for each in requests if it.count(f"requests WHERE request = '{each}'")]
    assert kept == requests[-2:]


def answered(ledger: Ledger, tenant: str, n_bytes: int, count: int, fetched: int) -> None:
    """Answers of a tenant, a second apart; the first ``fetched`` of them have been."""
    ledger.db.executemany(
        "INSERT INTO requests (request, tenant, owner, seq, fingerprint, n_bytes, at_s, answer, answered_s, fetched_s)"
        f" VALUES (?, '{tenant}', 'm', 0, 'f', 0, 0, ?, ?, ?)",
        ((f"{tenant}{k}", bytes(n_bytes), ledger.now_s + k, 2000.0 if k < fetched else None) for k in range(count)),
    )


def test_only_tenants_above_their_quota_lose_answers_and_what_was_fetched_first() -> None:
    it = World()
    it.ledger.tables = replace(it.ledger.tables, quotas={"acme": structs.replace(QUOTA, queued_mib=1), "bolt": QUOTA})
    for tenant in ("acme", "bolt"):
        answered(it.ledger, tenant, 300 << 10, 6, fetched=3)
    it.forget()
    kept = it.ledger.db.execute("SELECT request FROM requests WHERE owner = 'm' ORDER BY 1").fetchall()
    assert [row[0] for row in kept] == ["acme3", "acme4", "acme5", *(f"bolt{k}" for k in range(6))]


def test_one_round_reads_the_answers_once_whatever_the_number_of_tenants() -> None:
    def steps(tenants: int) -> int:
        """Steps of SQLite's machine, in hundreds."""
        ledger, count = Ledger(), 0
        answered(ledger, "acme", 10, 2000, fetched=2000)
        ledger.tables = replace(ledger.tables, quotas={"acme": QUOTA} | {f"t{n}": QUOTA for n in range(tenants)})

        def step() -> int:
            nonlocal count
            count += 1
            return 0

        ledger.db.set_progress_handler(step, 100)
        ledger.change(lambda tx: queue_writer.forget(tx, set()))
        return count

    assert steps(100) < 2 * steps(1)


def test_states_of_sampling_sessions_expire_and_named_ones_stay() -> None:
    it = World()
    it.submit(Save(for_sampler=True, sampler_seq=0))
    it.done(KEPT, PublishResult(version=0))
    it.submit(Save(name="named"))
    it.done(KEPT)
    it.submit(Save(name="for-a-while", ttl_s=10.0))
    it.done(KEPT)
    session = it.model.partition(":")[0]
    begin = it.ledger.now_s
    it.ledger.now_s += 20
    it.ledger.change(lambda tx: queue_writer.expire_states(tx, {}, begin))
    assert it.count("saved_states") == 2
    it.ledger.change(lambda tx: served(tx, "acme", f"{session}:sample:0", None))
    it.ledger.now_s += queue_writer.UNUSED_S
    asleep = it.ledger.now_s
    used = dict.fromkeys((row[0] for row in it.ledger.db.execute("SELECT path FROM samplers")), begin)
    it.ledger.change(lambda tx: queue_writer.expire_states(tx, used, asleep))
    assert it.count("saved_states") == 2, "the service was stopped until now, and no client could sample"
    it.ledger.change(lambda tx: queue_writer.expire_states(tx, {}, begin))
    assert [row[0] for row in it.ledger.db.execute("SELECT name FROM saved_states")] == ["named"]
    with pytest.raises(RequestError):
        it.ledger.change(lambda tx: served(tx, "acme", f"{session}:sample:0", None))
    assert it.ledger.change(queue_writer.drop_states) == []
    dropped = it.ledger.change(lambda tx: to_send(tx, it.adapter, it.number + 1))
    assert sorted(type(operation.what).__name__ for operation in dropped) == ["DropState", "DropState"]


def test_of_the_states_of_sampling_sessions_a_model_keeps_the_newest_and_those_that_are_sampled() -> None:
    """A program that opens one at each step: every minute, with no end in sight, and one for ten years each."""
    it = World()
    session, begin = it.model.partition(":")[0], it.ledger.now_s

    def save(seq: int) -> None:
        it.ledger.now_s += 60
        it.submit(Save(for_sampler=True, sampler_seq=seq, ttl_s=None if seq % 2 else 3e8))
        it.done(KEPT, PublishResult(version=0))

    def kept(**used_s: float) -> list[int]:
        """Numbers of the sessions, after a round of upkeep. ``used_s``: by number, when one was sampled last."""
        paths = dict(it.ledger.db.execute("SELECT sampler, path FROM samplers"))
        used = {paths[f"{session}:sample:{seq[1:]}"]: at for seq, at in used_s.items()}
        it.ledger.change(lambda tx: queue_writer.expire_states(tx, used, begin))
        names = [name for (name,) in it.ledger.db.execute("SELECT sampler FROM samplers")]
        assert it.count("saved_states WHERE named = 0") == len(names)
        return sorted(int(name.rpartition(":")[2]) for name in names)

    for seq in range(7):
        save(seq)
    it.submit(Save(name="named"))
    it.done(KEPT)
    for seq in range(7, 12):
        save(seq)
    one, two = (f"{session}:sample:{seq}" for seq in (1, 2))
    it.ledger.change(lambda tx: client_sessions.keep_sample(tx, "acme", two, "slow", "print", b"body"))
    assert kept(s1=it.ledger.now_s - 10) == [1, 2, *range(4, 12)], "those that no one samples are dropped"
    assert it.count("saved_states WHERE named = 1") == 1
    it.ledger.change(lambda tx: client_sessions.drop_samples(tx, ["slow"]))
    it.ledger.now_s += queue_writer.OVERTAKEN_S
    assert kept() == [*range(4, 12)]
    with pytest.raises(RequestError, match=r"not sampled for long \(fix: save the weights again"):
        it.ledger.change(lambda tx: served(tx, "acme", one, None))


def test_a_snapshot_that_could_not_be_loaded_leaves_and_the_next_one_is_made_anew() -> None:
    it = World()
    it.submit(Save(name="one"))
    it.done(KEPT)
    state, session = it.ledger.change(lambda tx: tx.states("1"))[0], it.model.partition(":")[0]
    sampler = it.ledger.change(lambda tx: open_sampler(tx, "acme", session, 0, state.path))
    adapter = AdapterRequest(name="snapshot-1", rank=4, weight=1.0, settings={})
    it.ledger.change(lambda tx: insert_snapshot(tx, "acme", adapter, state))
    key = it.ledger.tables.adapters["acme", "snapshot-1"].key
    failed = OperationFailure(reason="it is torn", by_client=False)
    it.ledger.change(lambda tx: expected(tx, key, 1))
    it.ledger.change(lambda tx: completed(tx, key, 1, failed))
    refused = it.ledger.change(lambda tx: served(tx, "acme", sampler, None))
    assert isinstance(refused, RequestError)
    assert refused.reason == "it is torn"
    assert ("acme", "snapshot-1") not in it.ledger.tables.adapters
    assert it.ledger.change(lambda tx: served(tx, "acme", sampler, None)) == state


def test_weights_that_are_saved_again_are_not_sampled_from_the_snapshot_of_the_old_ones() -> None:
    it = World()
    it.submit(Save(name="one"))
    it.done(KEPT)
    old, session = it.ledger.change(lambda tx: tx.states("1"))[0], it.model.partition(":")[0]
    sampler = it.ledger.change(lambda tx: open_sampler(tx, "acme", session, 0, old.path))

    def insert(name: str) -> None:
        """Serve the state of the first save; it may have been looked up before the second one."""
        adapter = AdapterRequest(name=name, rank=4, weight=1.0, settings={})
        it.ledger.change(lambda tx: insert_snapshot(tx, "acme", adapter, old))
        key = it.ledger.tables.adapters["acme", name].key
        it.ledger.change(lambda tx: expected(tx, key, 1))
        it.ledger.change(lambda tx: completed(tx, key, 1, KEPT))
        it.ledger.change(lambda tx: completed(tx, key, 2, PublishResult(version=1)))

    insert("snapshot-1")
    assert it.ledger.change(lambda tx: served(tx, "acme", sampler, None)) == "acme-snapshot-1.1@v1"
    it.submit(Save(name="one", overwrite=True))
    it.done(KEPT)
    for late in ("snapshot-2", "snapshot-3"):
        found = it.ledger.change(lambda tx: served(tx, "acme", sampler, None))
        assert isinstance(found, SavedState)
        assert (found.path, found.label) == (old.path, "n2")
        assert [name for _, name in it.ledger.tables.adapters if name.startswith("snapshot")] == []
        insert(late)


def test_a_save_under_a_name_in_use_drops_what_was_there_only_once_it_is_kept() -> None:
    it = World()
    it.submit(Save(name="one"))
    it.done(KEPT)
    it.submit(Save(name="one", overwrite=True))
    assert [row[0] for row in it.ledger.db.execute("SELECT label FROM saved_states")] == ["n1"]
    it.done(KEPT)
    assert [row[0] for row in it.ledger.db.execute("SELECT label FROM saved_states")] == ["n2"]
    assert it.ledger.db.execute("SELECT label FROM dropped_states").fetchall() == [("n1",)]


def test_a_save_in_flight_has_no_name() -> None:
    """Nothing is kept of it, so its outcome would be that of no state."""
    it = World()
    waits = it.submit(Save(for_sampler=True, name="one", in_flight=True))
    answer, _ = it.ledger.change(lambda tx: look(tx, "acme", waits))
    assert isinstance(answer, OperationFailure)
    assert "inflight" in answer.reason


def test_saved_states_have_a_quota() -> None:
    it = World()
    for number in range(QUOTA.saved):
        it.submit(Save(name=f"state{number}"))
        it.done(KEPT)
    above = it.submit(Save(name="another"))
    answer, _ = it.ledger.change(lambda tx: look(tx, "acme", above))
    assert isinstance(answer, OperationFailure)
    assert "the quota is 3 saved states" in answer.reason
    assert "areal-lora adapters keys RUN acme --quota saved=6" in answer.reason
    in_its_place = it.submit(Save(name="state0", overwrite=True))
    it.done(KEPT)
    answer, _ = it.ledger.change(lambda tx: look(tx, "acme", in_its_place))
    assert isinstance(answer, ActionResult), answer


def test_requests_of_an_adapter_that_failed_have_an_answer_and_its_load_is_not_made_later() -> None:
    it = World()
    it.submit(Save(name="one"))
    it.done(KEPT)
    it.submit(PASS)
    load = it.submit(Load(path=f"tinker://{it.model}/weights/one", optimizer=True))
    it.ledger.change(lambda tx: queue_writer.follow(tx, {it.adapter: "its disk is full"}))
    answer, _ = it.ledger.change(lambda tx: look(tx, "acme", load))
    assert isinstance(answer, OperationFailure)
    assert "its disk is full" in answer.reason
    again = it.ledger.change(lambda tx: to_send(tx, it.adapter, 2))
    assert not [operation for operation in again if isinstance(operation.what, LoadState)]


def test_a_trainer_that_has_lost_steps_ends_the_model() -> None:
    it = World()
    it.submit(PASS)
    it.submit(STEP)
    it.done(SCORED, STEPPED)
    it.durable()
    waits = it.submit(PASS)
    assert not it.ledger.change(lambda tx: expected(tx, it.adapter, 1))
    answer, _ = it.ledger.change(lambda tx: look(tx, "acme", waits))
    assert isinstance(answer, OperationFailure)
    with pytest.raises(RequestError, match="newest checkpoint"):
        it.submit(PASS)


def test_a_deleted_adapter_ends_its_model_and_its_states_stay() -> None:
    it = World()
    it.submit(Save(name="one"))
    it.done(KEPT)
    waits = it.submit(PASS)
    it.ledger.tables = Ledger().tables
    it.ledger.change(lambda tx: queue_writer.follow(tx, {}))
    answer, _ = it.ledger.change(lambda tx: look(tx, "acme", waits))
    assert isinstance(answer, OperationFailure)
    _, adapter = it.ledger.model(
        action=CreateModel(lora=None, load=Load(path=f"tinker://{it.model}/weights/one", optimizer=True))
    )
    [first] = it.ledger.change(lambda tx: to_send(tx, adapter, 1))
    assert first.what == LoadState(adapter=it.adapter, label="n1", optimizer=True)


def test_a_sample_is_kept_until_it_is_dropped_its_session_ends_or_a_day_is_over() -> None:
    it = World()
    session = it.model.partition(":")[0]
    sampler = it.ledger.change(lambda tx: open_sampler(tx, "acme", session, 0, None))
    for name in ("one", "two"):
        it.ledger.change(lambda tx, name=name: client_sessions.keep_sample(tx, "acme", sampler, name, "print", b"body"))
    it.ledger.change(lambda tx: client_sessions.keep_sample(tx, "acme", sampler, "one", "print", b"body"))
    with pytest.raises(RequestError, match="another request"):
        it.ledger.change(lambda tx: client_sessions.keep_sample(tx, "acme", sampler, "one", "another print", b"body"))
    it.ledger.change(lambda tx: client_sessions.drop_samples(tx, ["one"]))
    [kept] = it.ledger.change(client_sessions.kept_samples)
    assert (kept.sample, kept.tenant, kept.fingerprint, kept.body) == ("two", "acme", "print", b"body")
    it.ledger.now_s += client_sessions.UNFETCHED_S + 1
    it.ledger.change(lambda tx: client_sessions.keep_sample(tx, "acme", sampler, "three", "print", b"body"))
    it.ledger.change(lambda tx: client_sessions.drop_samples(tx, []))
    assert [each.sample for each in it.ledger.change(client_sessions.kept_samples)] == ["three"]
    it.ledger.change(lambda tx: end_session(tx, session))
    assert it.ledger.change(client_sessions.kept_samples) == []


def test_a_model_that_is_unloaded_leaves_once_and_what_it_saved_stays() -> None:
    it = World()
    it.submit(Save(name="one"))
    it.done(KEPT)
    waits = it.submit(PASS)
    requests = {it.ledger.change(lambda tx: unload(tx, "acme", it.model)) for _ in range(2)}
    assert requests == {f"{it.model}:unload"}
    assert it.ledger.change(lambda tx: look(tx, "acme", f"{it.model}:unload"))[0] == ActionResult(
        model=it.model, unloaded=True
    )
    answer, _ = it.ledger.change(lambda tx: look(tx, "acme", waits))
    assert isinstance(answer, OperationFailure)
    assert it.ledger.change(lambda tx: tx.state("acme", f"tinker://{it.model}/weights/one"))
    with pytest.raises(RequestError):
        it.ledger.change(lambda tx: unload(tx, "bolt", it.model))


def test_a_model_is_made_once_also_when_its_request_is_forgotten() -> None:
    it = World()
    it.ledger.change(lambda tx: unload(tx, "acme", it.model))
    it.ledger.db.execute("DELETE FROM requests")
    session, adapter = it.model.partition(":")[0], AdapterRequest(name="again", rank=4, weight=1.0, settings={})
    action = CreateModel(lora=LORA)
    it.ledger.change(lambda tx: insert_model(tx, "acme", adapter, session, 0, "f", action, LORA))
    assert it.count("models") == 1
    assert not it.ledger.tables.of("acme")


@pytest.mark.parametrize(("seq", "status"), [(0, 422), (10**5, 429)])
def test_a_number_that_cannot_be_is_refused_before_the_queue_is_read(
    seq: int, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = World()
    monkeypatch.delattr(sequencer, "waiting")
    with pytest.raises(RequestError) as refused:
        it.ledger.change(lambda tx: submit(tx, "acme", it.model, seq, "f", STEP))
    assert refused.value.status == status


def test_a_pass_above_the_quota_of_bytes_fails_its_window_and_the_next_one_begins_clean() -> None:
    it = World()
    large = Train(what=Pass(data=(Datum(tokens=b"x" * (QUOTA.queued_mib << 20), weights=b""),), loss=Loss.DRO))
    it.submit(PASS)
    it.submit(STEP)
    it.done(SCORED, STEPPED)
    with pytest.raises(RequestError) as refused:
        it.submit(large)
    assert refused.value.status == 429, "a checkpoint will free the data of the step"
    it.seq -= 1
    it.durable()
    waits = it.submit(large)
    [sent] = it.ledger.change(lambda tx: to_send(tx, it.adapter, 3))
    assert isinstance(sent.what, Poison)
    assert "optim_step, or fewer data" in sent.what.reason
    it.done(OperationFailure(reason=sent.what.reason, by_client=True))
    assert isinstance(it.ledger.change(lambda tx: look(tx, "acme", waits))[0], OperationFailure)
    it.submit(STEP)
    it.done(OperationFailure(reason="its window has failed", by_client=True))
    it.submit(PASS)
    assert it.count("client_operations WHERE failed IS NULL") == 1
