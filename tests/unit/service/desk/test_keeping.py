"""What is removed when no one needs it, and what is not."""

from __future__ import annotations

import pytest

from areal_lora.operations.messages import (
    Datum,
    Failed,
    Kept,
    LoadState,
    Loss,
    OptimStep,
    Pass,
    Poison,
    Published,
    Scored,
    Stepped,
)
from areal_lora.service.desk import keeping, samples
from areal_lora.service.desk.asks import CreateModel, Load, Save, SaveForSampler, Train, Unloaded
from areal_lora.service.desk.models import end_session, open_sampler, served, unload
from areal_lora.service.desk.numbers import completed, expected, to_send
from areal_lora.service.desk.requests import look, submit
from areal_lora.service.refused import Refused
from tests.support.service.books import QUOTA, Ledger

PASS = Train(what=Pass(data=(), loss=Loss.DRO))
STEP = Train(what=OptimStep(lr=1.0))
SCORED, KEPT = Scored(logprobs=(b"x" * 1000,), loss=0.0), Kept(step=1, n_bytes=9)
STEPPED = Stepped(step=1, grad_norm=1.0, skipped=False)


class World:
    """One model, and outcomes as a test gives them."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.model, self.adapter = self.ledger.model()
        self.ledger.change(lambda books: expected(books, self.adapter, 1))
        self.seq = self.number = 0

    def ask(self, ask: Train | Save | SaveForSampler | Load) -> str:
        self.seq += 1
        return self.ledger.change(lambda books: submit(books, "acme", self.model, self.seq, "f", ask))

    def done(self, *outcomes: Scored | Stepped | Kept | Published | Failed) -> None:
        for outcome in outcomes:
            self.number += 1
            self.ledger.change(lambda books, o=outcome: completed(books, self.adapter, self.number, o))

    def count(self, sql: str) -> int:
        return int(self.ledger.db.execute(f"SELECT COUNT(*) FROM {sql}").fetchone()[0])

    def forget(self, *fetched: str) -> None:
        self.ledger.change(lambda books: keeping.forget(books, set(fetched)))


def test_data_are_kept_until_a_step_covers_them() -> None:
    it = World()
    it.ask(PASS)
    it.ask(PASS)
    it.done(SCORED, SCORED)
    it.ledger.now_s += 10 * keeping.ANSWERED_S
    it.forget()
    again = it.ledger.change(lambda books: to_send(books, it.adapter, 1, 9))
    assert [operation.what for operation in again] == [PASS.what, PASS.what], "the trainer may ask for them again"
    it.ask(STEP)
    it.done(STEPPED)
    assert (
        it.count("client_operations") == it.count("requests WHERE ask IS NOT NULL AND owner = '" + it.model + "'") == 0
    )


def test_of_a_failed_window_no_data_are_kept() -> None:
    it = World()
    it.ask(PASS)
    it.ask(STEP)
    it.done(Failed(reason="bad", by_client=True), Failed(reason="bad", by_client=True))
    assert it.count("requests WHERE n_bytes > 0 AND ask IS NOT NULL AND seq > 0") == 0
    it.ask(PASS)
    it.ask(STEP)
    it.done(SCORED, STEPPED)
    assert it.count("client_operations") == 0


def test_answers_are_kept_for_an_hour_after_they_were_fetched_and_else_for_a_day() -> None:
    it = World()
    first, second = it.ask(PASS), it.ask(STEP)
    it.done(SCORED, STEPPED)
    it.forget(first)
    it.ledger.now_s += keeping.FETCHED_S + 1
    it.forget()
    with pytest.raises(Refused):
        it.ledger.change(lambda books: look(books, "acme", first))
    assert it.ledger.change(lambda books: look(books, "acme", second))[0] == STEPPED
    with pytest.raises(Refused, match="answered long ago"):
        it.ledger.change(lambda books: submit(books, "acme", it.model, 1, "f", PASS))
    it.ledger.now_s += keeping.ANSWERED_S
    it.forget()
    assert it.count("requests") == 0


def test_the_oldest_answers_of_a_tenant_leave_when_they_are_too_long_together() -> None:
    it = World()
    requests = []
    for _ in range(5):
        requests.append(it.ask(PASS))
        it.ask(STEP)
        it.done(SCORED, STEPPED)
        it.ledger.now_s += 1
    it.ledger.change(lambda books: keeping._shorten(books, "acme", 2500))
    kept = [each for each in requests if it.count(f"requests WHERE request = '{each}'")]
    assert kept == requests[-2:]


def test_states_of_sampling_sessions_expire_and_named_ones_stay() -> None:
    it = World()
    it.ask(SaveForSampler(sampler_seq=0))
    it.done(KEPT, Published(version=0))
    it.ask(Save(name="named"))
    it.done(KEPT)
    it.ask(Save(name="for-a-while", ttl_s=10.0))
    it.done(KEPT)
    session = it.model.partition(":")[0]
    begin = it.ledger.now_s
    it.ledger.now_s += 20
    it.ledger.change(lambda books: keeping.expire_states(books, {}, begin))
    assert it.count("saved_states") == 2
    it.ledger.change(lambda books: served(books, "acme", f"{session}:sample:0", None))
    it.ledger.now_s += keeping.UNUSED_S
    it.ledger.change(lambda books: keeping.expire_states(books, {}, begin))
    assert [row[0] for row in it.ledger.db.execute("SELECT name FROM saved_states")] == ["named"]
    with pytest.raises(Refused):
        it.ledger.change(lambda books: served(books, "acme", f"{session}:sample:0", None))
    assert it.ledger.change(keeping.drop_states) == []
    dropped = it.ledger.change(lambda books: to_send(books, it.adapter, it.number + 1, 9))
    assert sorted(type(operation.what).__name__ for operation in dropped) == ["DropState", "DropState"]


def test_a_save_under_a_name_in_use_drops_what_was_there_only_once_it_is_kept() -> None:
    it = World()
    it.ask(Save(name="one"))
    it.done(KEPT)
    it.ask(Save(name="one", overwrite=True))
    assert [row[0] for row in it.ledger.db.execute("SELECT label FROM saved_states")] == ["n1"]
    it.done(KEPT)
    assert [row[0] for row in it.ledger.db.execute("SELECT label FROM saved_states")] == ["n2"]
    assert it.ledger.db.execute("SELECT label FROM dropped_states").fetchall() == [("n1",)]


def test_saved_states_have_a_quota() -> None:
    it = World()
    for number in range(QUOTA.saved):
        it.ask(Save(name=f"state{number}"))
        it.done(KEPT)
    above = it.ask(Save(name="another"))
    answer, _ = it.ledger.change(lambda books: look(books, "acme", above))
    assert isinstance(answer, Failed)
    assert "saved states" in answer.reason


def test_requests_of_an_adapter_that_failed_have_an_answer_and_its_load_is_not_made_later() -> None:
    it = World()
    it.ask(Save(name="one"))
    it.done(KEPT)
    it.ask(PASS)
    load = it.ask(Load(path=f"tinker://{it.model}/weights/one", optimizer=True))
    it.ledger.change(lambda books: keeping.follow(books, {it.adapter: "its disk is full"}))
    answer, _ = it.ledger.change(lambda books: look(books, "acme", load))
    assert isinstance(answer, Failed)
    assert "its disk is full" in answer.reason
    again = it.ledger.change(lambda books: to_send(books, it.adapter, 2, 9))
    assert not [operation for operation in again if isinstance(operation.what, LoadState)]


def test_a_trainer_that_has_lost_steps_ends_the_model() -> None:
    it = World()
    it.ask(PASS)
    it.ask(STEP)
    it.done(SCORED, STEPPED)
    waits = it.ask(PASS)
    assert not it.ledger.change(lambda books: expected(books, it.adapter, 1))
    answer, _ = it.ledger.change(lambda books: look(books, "acme", waits))
    assert isinstance(answer, Failed)
    with pytest.raises(Refused, match="newest checkpoint"):
        it.ask(PASS)


def test_a_deleted_adapter_ends_its_model_and_its_states_stay() -> None:
    it = World()
    it.ask(Save(name="one"))
    it.done(KEPT)
    waits = it.ask(PASS)
    it.ledger.tables = Ledger().tables
    it.ledger.change(lambda books: keeping.follow(books, {}))
    answer, _ = it.ledger.change(lambda books: look(books, "acme", waits))
    assert isinstance(answer, Failed)
    _, adapter = it.ledger.model(
        ask=CreateModel(lora=None, load=Load(path=f"tinker://{it.model}/weights/one", optimizer=True))
    )
    [first] = it.ledger.change(lambda books: to_send(books, adapter, 1, 9))
    assert first.what == LoadState(adapter=it.adapter, label="n1", optimizer=True)


def test_a_sample_is_kept_until_it_is_dropped_its_session_ends_or_a_day_is_over() -> None:
    it = World()
    session = it.model.partition(":")[0]
    sampler = it.ledger.change(lambda books: open_sampler(books, "acme", session, 0, None))
    for name in ("one", "two"):
        it.ledger.change(lambda books, name=name: samples.keep(books, "acme", sampler, name, "print", b"body"))
    it.ledger.change(lambda books: samples.keep(books, "acme", sampler, "one", "print", b"body"))
    with pytest.raises(Refused, match="another request"):
        it.ledger.change(lambda books: samples.keep(books, "acme", sampler, "one", "another print", b"body"))
    it.ledger.change(lambda books: samples.drop(books, ["one"]))
    [kept] = it.ledger.change(samples.kept)
    assert (kept.sample, kept.tenant, kept.fingerprint, kept.ask) == ("two", "acme", "print", b"body")
    it.ledger.now_s += samples.UNFETCHED_S + 1
    it.ledger.change(lambda books: samples.keep(books, "acme", sampler, "three", "print", b"body"))
    it.ledger.change(lambda books: samples.drop(books, []))
    assert [each.sample for each in it.ledger.change(samples.kept)] == ["three"]
    it.ledger.change(lambda books: end_session(books, session))
    assert it.ledger.change(samples.kept) == []


def test_a_model_that_is_unloaded_leaves_once_and_what_it_saved_stays() -> None:
    it = World()
    it.ask(Save(name="one"))
    it.done(KEPT)
    waits = it.ask(PASS)
    requests = {it.ledger.change(lambda books: unload(books, "acme", it.model)) for _ in range(2)}
    assert requests == {f"{it.model}:unload"}
    assert it.ledger.change(lambda books: look(books, "acme", f"{it.model}:unload"))[0] == Unloaded(model=it.model)
    answer, _ = it.ledger.change(lambda books: look(books, "acme", waits))
    assert isinstance(answer, Failed)
    assert it.ledger.change(lambda books: books.state("acme", f"tinker://{it.model}/weights/one"))
    with pytest.raises(Refused):
        it.ledger.change(lambda books: unload(books, "bolt", it.model))


def test_a_pass_above_the_quota_of_bytes_fails_its_window_and_the_next_one_begins_clean() -> None:
    it = World()
    large = Train(what=Pass(data=(Datum(tokens=b"x" * (QUOTA.queued_mib << 20), weights=b""),), loss=Loss.DRO))
    waits = it.ask(large)
    [sent] = it.ledger.change(lambda books: to_send(books, it.adapter, 1, 9))
    assert isinstance(sent.what, Poison)
    assert "optim_step, or fewer data" in sent.what.reason
    it.done(Failed(reason=sent.what.reason, by_client=True))
    assert isinstance(it.ledger.change(lambda books: look(books, "acme", waits))[0], Failed)
    it.ask(STEP)
    it.done(Failed(reason="its window has failed", by_client=True))
    it.ask(PASS)
    assert it.count("client_operations WHERE fate IS NULL") == 1
