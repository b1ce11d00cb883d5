"""The state machine of a scheduler: Hypothesis draws what engine and clients do, the rig compares; and that of a
scheduler whose model has layers of several kinds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from paged.scheduler import Hint
from paged.testing.protocol import Capabilities
from paged.testing.rig_machine import RigMachine, cut_to
from paged.testing.scheduler_rig import SchedulerRig
from paged.testing.strategies import (
    SESSIONS,
    Knowledge,
    Wish,
    knowledge,
    layer_worlds,
    picks,
    retaining_worlds,
    scheduler_worlds,
    tails,
    where,
    wishes,
)
from paged.testing.world import World, build_scheduler

COUNTS = st.sampled_from([(), (), (), (1, 0), (2,), (3, 1), (0,), (1, 2, 0)])
"""How many tokens the sampling rows of a batch get, over and over; empty: one each."""
MAX_LIVE = 8


class SchedulerMachine(RigMachine):
    """Subclass it and override `build`, `capabilities` and `policy` to test another scheduler.

    `policy`: the one of ours whose order and limits it keeps in every world; None: the one that `World.policy` names.
    """

    build: ClassVar[Any] = staticmethod(build_scheduler)
    capabilities: ClassVar[Capabilities] = Capabilities()
    policy: ClassVar[str | None] = None

    rig: SchedulerRig

    @initialize(
        world=scheduler_worlds(),
        opening=st.lists(wishes(), min_size=1, max_size=4),
        is_alike=st.sampled_from([False, False, True]),
    )
    def begin(self, world: World, opening: list[Wish], is_alike: bool) -> None:
        """Requests that are there from the start, together; their prompts may begin alike."""
        world = replace(cut_to(self.capabilities, world), policy=self.policy or world.policy)
        self.rig = SchedulerRig(world, type(self).build)
        for wish in opening:
            self.add(replace(wish, prompt=opening[0].prompt + wish.prompt) if is_alike else wish, again=False)

    @invariant()
    def everything_holds(self) -> None:
        """After each rule, and not after each call of it."""
        self.rig.look()

    @where(lambda self: len(self.rig.live) < MAX_LIVE)
    @rule(wish=wishes(), again=st.sampled_from([False, False, False, True]))
    def add(self, wish: Wish, again: bool) -> None:
        number = max(0, self.rig.num_added - 1) if again else self.rig.num_added
        taken = self.rig.taken_ids if again else []
        # Not drawn, so that all else is drawn as it was.
        wish = replace(wish, saves=number % 5 == 2)
        self.rig.add(wish.request(taken[-1] if taken else f"r{number}", self.rig.world, self.capabilities))

    @where(lambda self: len(self.rig.live) < MAX_LIVE)
    @rule(wish=wishes(), more=tails(), num_alike=st.integers(1, 4))
    def arrive_together(self, wish: Wish, more: list[int], num_alike: int) -> None:
        """Two requests whose prompts share so many blocks come at once, before all others; the second may follow."""
        prompt = (wish.prompt * 2 * self.rig.world.block_size)[: num_alike * self.rig.world.block_size]
        wish = replace(
            wish, share=0.8, reads_cache=True, writes_cache=True, priority=-2, num_sequences=1, num_computed=0
        )
        self.add(replace(wish, prompt=prompt), again=False)
        self.add(replace(wish, prompt=prompt + more), again=False)
        if not self.rig.flights:
            self.schedule_ahead(2)

    @where(lambda self: len(self.rig.live) < MAX_LIVE)
    @rule(
        wish=wishes(),
        share=st.sampled_from([0.2, 0.5]),
        output=st.sampled_from([0.5, 1.0]),
        steps=st.integers(4, 24),
        counts=COUNTS,
        is_patient=st.booleans(),
        runs_dry=st.booleans(),
    )
    def crowd(
        self,
        wish: Wish,
        share: float,
        output: float,
        steps: int,
        counts: tuple[int, ...],
        is_patient: bool,
        runs_dry: bool,
    ) -> None:
        """Three prompts grow until they are in each other's way; the first may be long enough to drive both others
        out, and the last a group. In the end all may have to wait for tokens, with all that is reserved for them."""
        wish = replace(wish, share=0.2, output=output, num_computed=0)
        self.add(replace(wish, share=share, output=1.0, num_sequences=1, salt=None), again=False)
        self.add(replace(wish, num_sequences=1, salt="a"), again=False)
        self.add(replace(wish, salt="b"), again=False)
        if is_patient:
            self.serve(steps, counts)
        else:
            self.go_on(steps, counts)
        if runs_dry:
            self.rig.step(self._given((0,)), is_patient=False)
            self.go_on(3, ())

    @where(lambda self: len(self.rig.flights) < 3)
    @rule()
    def schedule(self) -> None:
        self.rig.schedule()

    @where(lambda self: self.rig.live and not self.rig.flights)
    @rule(ahead=st.integers(2, 3))
    def schedule_ahead(self, ahead: int) -> None:
        """Several batches before the first one ends."""
        for _ in range(ahead):
            self.rig.schedule()

    @where(lambda self: self.rig.has_work)
    @rule(ahead=st.integers(1, 2), steps=st.integers(2, 8), counts=COUNTS, num_cancelled=st.integers(0, 3))
    def go_ahead(self, ahead: int, steps: int, counts: tuple[int, ...], num_cancelled: int) -> None:
        """Steps with so many more batches out than the one that ends. The last of them may fail together, also after
        the moves of the newest."""
        self._steps(steps, counts, is_patient=False, ahead=ahead)
        if self.capabilities.cancel:
            for number in range(num_cancelled):
                self.rig.cancel(number == 0 and ahead > 1)

    @where(lambda self: self.rig.has_work)
    @rule(steps=st.integers(1, 8), counts=COUNTS)
    def serve(self, steps: int, counts: tuple[int, ...]) -> None:
        """A few whole steps, as an engine without surprises makes them."""
        self._steps(steps, counts, counts)

    def _steps(self, steps: int, first: tuple[int, ...], then: tuple[int, ...] = (), **how: Any) -> None:
        """At most so many steps: the first with these counts, the others with those."""
        for number in range(steps):
            if self.rig.has_work:
                self.rig.step(self._given(then if number else first), **how)

    @property
    def gives_counts(self) -> bool:
        """Whether a row may get another number of tokens than one, none among them."""
        return self.capabilities.drafts and self.capabilities.append

    def _given(self, counts: tuple[int, ...]) -> tuple[int, ...]:
        return counts if self.gives_counts else ()

    @where(lambda self: self.rig.has_work)
    @rule(steps=st.integers(2, 12), counts=COUNTS)
    def go_on(self, steps: int, counts: tuple[int, ...]) -> None:
        """Steps of an engine that does not wait: loads stay outstanding, and what samples nothing gets no tokens."""
        self._steps(steps, counts, is_patient=False)

    @where(lambda self: self.rig.flights)
    @rule(pick=picks)
    def run(self, pick: int) -> None:
        self.rig.run(pick % len(self.rig.flights))

    @where(lambda self: self.rig.flights)
    @rule(counts=COUNTS)
    def update(self, counts: tuple[int, ...]) -> None:
        self.rig.update(self._given(counts))

    @where(lambda self: self.capabilities.cancel and self.rig.flights)
    @rule(moved=st.booleans())
    def cancel(self, moved: bool) -> None:
        self.rig.cancel(moved)

    @where(lambda self: self.capabilities.cancel and not self.rig.flights)
    @rule(moved=st.booleans())
    def take_back(self, moved: bool) -> None:
        """A step that fails in the engine."""
        self.rig.schedule()
        self.rig.cancel(moved)

    @where(lambda self: self.capabilities.cancel and not self.rig.flights and self.rig.world.keeps_content_on_host)
    @rule(wish=wishes(), steps=st.integers(1, 8), num_gone=st.integers(0, 2), pick=picks)
    def take_back_copies(self, wish: Wish, steps: int, num_gone: int, pick: int) -> None:
        """The first step that copies anything fails before it has. The request that it copied for may go
        meanwhile, and an unknown prompt take the room."""
        for _ in range(steps):
            batch = self.rig.schedule()
            if len(batch.moves):
                self.rig.cancel(False)
                for _ in range(min(num_gone, len(self.rig.live))):
                    self.rig.abort(self.rig.live[pick % len(self.rig.live)])
                if num_gone:
                    self.add(
                        replace(wish, share=1.0, num_sequences=1, num_computed=0, priority=-1, salt="b"), again=False
                    )
                self.go_on(2, ())
                break
            self.rig.update(())

    @where(lambda self: self.capabilities.cancel and not self.rig.flights and self.rig.world.keeps_content_on_host)
    @where(lambda self: self.forks and self.rig.world.num_blocks > 4 and len(self.rig.live) < MAX_LIVE - 3)
    @rule(
        wish=wishes(), num_before=st.sampled_from([0, 0, 3]), num_after=st.sampled_from([0, 3, 4]), leaves=st.booleans()
    )
    def come_back_in_vain(self, wish: Wish, num_before: int, num_after: int, leaves: bool) -> None:
        """What others drove to the host comes back for a batch that fails before it has copied anything. Before
        and after, a request that waits for tokens forks, and may leave: what forks drive out goes to the host, too."""
        length = self.rig.world.block_size + 1
        first = Wish(wish.prompt[:1] * length, output=0.01)
        for salt in (None, "b", "c"):
            self.add(
                replace(first, prompt=wish.prompt[:1] * (99 if salt else length), share=0.5, salt=salt), again=False
            )
            self.go_on(12, ())
        self.add(replace(first, output=1.0, salt="a"), again=False)
        id = self.rig.live[-1] if self.rig.live else ""
        self.rig.step(self._given((0,)), is_patient=False)
        self.add(first, again=False)
        if not self.rig.flights and len(self.rig.schedule().moves) and self.rig.flights:
            self._fork_often(id, num_before)
            self.rig.cancel(False)
            self._fork_often(id, num_after)
            if leaves and id in self.rig.live:
                self.rig.abort(id)
            self.go_on(3, ())

    def _fork_often(self, id: str, num_forks: int) -> None:
        for _ in range(num_forks if id in self.rig.live else 0):
            self.rig.fork(id)

    @where(lambda self: self.capabilities.cancel and not self.rig.flights and self.rig.world.host_blocks)
    @rule(
        steps=st.integers(6, 24),
        more=st.integers(1, 3),
        moved=st.sampled_from([True, True, False]),
        has_run=st.booleans(),
    )
    def take_back_several(self, steps: int, more: int, moved: bool, has_run: bool) -> None:
        """The first step that copies anything fails, and with it some that were scheduled behind it."""
        for _ in range(steps):
            if not self.rig.has_work:
                return
            batch = self.rig.schedule()
            if len(batch.moves):
                for _ in range(more):
                    self.rig.schedule()
                if has_run and self.rig.flights:
                    self.rig.run(0)
                self.rig.cancel(moved)
                while self.rig.flights:
                    self.rig.cancel(False)
                self.go_on(4, ())
                return
            self.rig.update(())

    @where(lambda self: self.rig.live)
    @rule(pick=picks)
    def abort(self, pick: int) -> None:
        self.rig.abort(self.rig.live[pick % len(self.rig.live)])

    @where(lambda self: len(self.in_flight) > 1)
    @rule(num_gone=st.integers(2, 3))
    def leave_together(self, num_gone: int) -> None:
        """Several are aborted while a batch computes for them."""
        for id in self.in_flight[:num_gone]:
            self.rig.abort(id)

    @where(lambda self: self.gives_counts and not self.rig.flights and len(self.rig.live) < MAX_LIVE)
    @rule(wish=wishes(), num_sequences=st.integers(1, 3), steps=st.integers(4, 16))
    def starve(self, wish: Wish, num_sequences: int, steps: int) -> None:
        """One sequence of the latest request gets no token and waits for the caller; its siblings, and a request
        before it, grow until it has to give its memory back."""
        wish = replace(wish, share=0.2, output=1.0, num_computed=0, eos=None, stop=(), priority=0)
        self.add(replace(wish, num_sequences=1), again=False)
        self.add(replace(wish, num_sequences=num_sequences, salt="b"), again=False)
        self.go_on(2, ())
        # Its rows stand at the end of the batch.
        self.rig.step((1,) * (self.rig.num_running() - 1) + (0,), is_patient=False)
        self.go_on(steps, ())

    @property
    def in_flight(self) -> list[str]:
        """Live requests for which a batch computes."""
        return [id for id in self.rig.live if self.rig.in_flight(id)]

    @rule(pick=picks)
    def abort_anyone(self, pick: int) -> None:
        self.rig.abort(f"r{pick}")

    @where(lambda self: self.capabilities.append and self.rig.live)
    @rule(pick=picks, tokens=tails(longest=3), sequence=st.integers(0, 2))
    def append(self, pick: int, tokens: list[int], sequence: int) -> None:
        id = self.rig.live[pick % len(self.rig.live)]
        self.rig.append(id, tokens, sequence % len(self.rig.books[id].sequences))

    @property
    def forks(self) -> bool:
        """Whether the subject forks sequences that run."""
        return self.capabilities.fork and hasattr(self.rig.scheduler, "fork")

    @where(lambda self: self.forks and self.rig.live)
    @rule(pick=picks, sequence=st.integers(0, 3))
    def fork(self, pick: int, sequence: int) -> None:
        id = self.rig.live[pick % len(self.rig.live)]
        self.rig.fork(id, sequence % len(self.rig.books[id].sequences))

    @where(lambda self: len(self.rig.live) < MAX_LIVE - 1)
    @rule(wish=wishes(), is_served=st.booleans())
    def add_twins(self, wish: Wish, is_served: bool) -> None:
        """Two equal short prompts: the second shares what a batch computes for the first, or follows it."""
        keys: dict[str, Any] = dict.fromkeys(("salt", "adapter", "extra_key"))
        twin = replace(wish, share=0.3, output=0.1, num_sequences=1, num_computed=0, priority=-1, **keys)
        twin = replace(twin, reads_cache=True, writes_cache=True)
        self.add(twin, again=False)
        self.add(twin, again=False)
        for _ in range(2 * is_served):
            self.serve(1, ())

    @property
    def takes_hints(self) -> bool:
        """Whether the subject takes hints: in the worlds that pin, so that all else is as frequent in the others."""
        return self.capabilities.hints and hasattr(self.rig.scheduler, "hint") and self.rig.world.max_pinned > 0

    @where(lambda self: self.takes_hints)
    @rule(what=knowledge())
    def hint(self, what: Knowledge) -> None:
        self.rig.hint(self._hint_of(what))

    @where(lambda self: self.takes_hints)
    @rule(first=knowledge(), more=st.lists(knowledge(), min_size=1, max_size=3))
    def hint_often(self, first: Knowledge, more: list[Knowledge]) -> None:
        """Several of one session, request or prompt."""
        for what in (first, *more):
            self.hint(replace(what, target=first.target, pick=first.pick, length=first.length))

    def _hint_of(self, what: Knowledge) -> Any:
        rig, target = self.rig, dict[str, Any]()
        namespace: Any = ("request", None, None, None)
        if what.target == "session" or what.action == "end":
            known = sorted(rig.hints.sessions) or [*SESSIONS]
            target = {"session": "nobody's" if what.pick == 11 else known[what.pick % len(known)]}
        elif what.target == "request":
            ids = [*rig.live, *rig.taken_ids, *sorted(rig.past)[:2], "nobody's"]
            target = {"request": ids[what.pick % len(ids)]}
        else:
            turns = [(turn.namespace, turn.tokens) for each in rig.hints.sessions.values() for turn in each.left[-1:]]
            turns += [rig.known(id, 0) for id in rig.live] or [(namespace, [0] * 24)]
            namespace, tokens = turns[what.pick % len(turns)]
            target = {"tokens": tokens[: what.length]}
        _, salt, adapter, extra_key = namespace
        if "tokens" in target:
            target |= {"salt": salt, "adapter": adapter, "extra_key": extra_key}
        waits_for = what.waits_for if what.action == "retain" else None
        wishes: Any = {"action": what.action, "waits_for": waits_for, **target}
        return Hint(**wishes, priority=what.priority, lasts=what.lasts, tenant=what.tenant)

    @where(lambda self: self.takes_hints and len(self.rig.live) < MAX_LIVE - 1)
    @rule(
        wish=wishes(),
        pick=picks,
        length=st.sampled_from([0, 0, 0, 1, 4]),
        more=tails(longest=3),
        hints=st.lists(knowledge(), max_size=3),
        is_pressed=st.booleans(),
    )
    def take_turn(
        self, wish: Wish, pick: int, length: int, more: list[int], hints: list[Knowledge], is_pressed: bool
    ) -> None:
        """A session goes on where it ended, or a few tokens before. Hints of what it left come, then another prompt."""
        id = SESSIONS[pick % len(SESSIONS)]
        turn = replace(wish, session=id, priority=-1, output=0.1, num_computed=0, num_sequences=1, writes_cache=True)
        session = self.rig.hints.sessions.get(id)
        if session is not None and session.left:
            namespace: Any = session.left[-1].namespace
            _, salt, adapter, extra_key = namespace
            tokens = session.left[-1].tokens
            turn = replace(turn, share=1.0, salt=salt, adapter=adapter, extra_key=extra_key)
            turn = replace(turn, prompt=tokens[: len(tokens) - length] + more)
        self.add(turn, again=False)
        self.serve(6, ())
        for what in hints:
            sessions = sorted(self.rig.hints.sessions)
            self.hint(replace(what, pick=sessions.index(id) if id in sessions else 11))
        if is_pressed:
            self.add(replace(turn, session=None, salt="z", output=0.1, share=0.8), again=False)
            self.serve(3, ())

    @where(lambda self: self.takes_hints and len(self.rig.live) < MAX_LIVE)
    @rule(pick=picks, tenant=st.sampled_from([None, "t"]))
    def pin_for_all(self, pick: int, tenant: str | None) -> None:
        """A request of one block is to be pinned when it ends. Then its prompt is, for two tenants, until one of them
        unpins it."""
        prompt, id = [pick % 2] * self.rig.world.block_size, f"r{self.rig.num_added}"
        self.add(Wish(prompt, output=0.01, priority=-2), again=False)
        if id in self.rig.live:
            self.rig.hint(Hint(action="pin", request=id, tenant=tenant))
        self.serve(4, ())
        for each in (None, "t"):
            self.rig.hint(Hint(action="pin", tokens=prompt, tenant=each))
        self.rig.hint(Hint(action="unpin", tokens=prompt, tenant=tenant))

    @where(lambda self: self.takes_hints and self.rig.world.keeps_content_on_host and not self.rig.live)
    @rule()
    def fetch_together(self) -> None:
        """Two prompts of a block leave the device for the host, and are brought back in one step. Newer prompts stay
        where no request may go."""
        size, last = self.rig.world.block_size, Wish([0] * 99, output=0.01, salt="z", writes_cache=False)
        newer = [Wish([0] * size, output=0.01, salt=str(number)) for number in range(self.rig.world.max_pinned + 1)]
        for wish in (*(Wish([token] * size, output=0.01) for token in (0, 1)), *newer, last):
            self.add(wish, again=False)
            self.serve(40, ())
        for token in (0, 1):
            self.rig.hint(Hint(action="prefetch", tokens=[token] * size))
        self.serve(1, ())

    @property
    def of_several(self) -> list[str]:
        """Live requests of several sequences."""
        return [id for id in self.rig.live if len(self.rig.books[id].sequences) > 1]

    @where(lambda self: self.forks and self.of_several)
    @rule(pick=picks, sequence=st.integers(0, 3))
    def finish(self, pick: int, sequence: int) -> None:
        id = self.of_several[pick % len(self.of_several)]
        self.rig.finish(id, sequence % len(self.rig.books[id].sequences))

    @property
    def running(self) -> list[str]:
        """Live requests that run."""
        return [id for id in self.rig.live if self.rig.scheduler.status(id) == "running"]

    @where(lambda self: self.forks and not self.rig.flights and self.running)
    @rule(
        pick=picks,
        num_forks=st.integers(1, 2),
        steps=st.integers(0, 6),
        counts=COUNTS,
        is_cancelled=st.booleans(),
        appended=st.integers(0, 2),
    )
    def branch(
        self, pick: int, num_forks: int, steps: int, counts: tuple[int, ...], is_cancelled: bool, appended: int
    ) -> None:
        """A sequence goes on in several ways for some steps, the first of which may fail; then the first way ends."""
        id = self.running[pick % len(self.running)]
        first = next(n for n, each in enumerate(self.rig.books[id].sequences) if each.reason is None)
        for _ in range(num_forks):
            self.rig.fork(id, first)
        if appended and self.capabilities.append and id in self.rig.live and not self.rig.in_flight(id):
            self.rig.append(id, [0] * appended, len(self.rig.books[id].sequences) - 1)
        if is_cancelled and self.capabilities.cancel:
            self.rig.schedule()
            self.rig.cancel(False)
        self.go_on(steps, counts)
        while self.rig.flights:
            self.rig.update(())
        if id in self.rig.live:
            self.rig.finish(id, first)

    @where(lambda self: self.rig.loads)
    @rule(pick=picks, num_tokens=st.integers(0, 8))
    def loaded(self, pick: int, num_tokens: int) -> None:
        self.rig.loaded(sorted(self.rig.loads)[pick % len(self.rig.loads)], num_tokens)

    @where(lambda self: self.rig.saving)
    @rule(pick=picks)
    def saved(self, pick: int) -> None:
        self.rig.saved(sorted(self.rig.saving)[pick % len(self.rig.saving)])


Keeps = list[tuple[int, float | None] | None]
KEEPS = st.lists(st.sampled_from([None, (1, None), (2, None), (3, 6.0)]), min_size=1, max_size=2)
"""Level and time at which the turns of a conversation are retained, in turns."""


class LayerMachine(SchedulerMachine):
    """Its worlds have `groups`."""

    capabilities: ClassVar[Capabilities] = Capabilities(external_tokens=False)

    @initialize(
        world=layer_worlds() | retaining_worlds(),
        opening=st.lists(wishes(), min_size=1, max_size=4),
        is_alike=st.booleans(),
        num_turns=st.sampled_from([0, 2, 3, 4]),
        keeps=KEEPS,
    )
    def begin(  # type: ignore[override]
        self, world: World, opening: list[Wish], is_alike: bool, num_turns: int, keeps: Keeps
    ) -> None:
        """Requests that are there from the start; their prompts may begin alike, or come after a conversation. Where
        there is a host, answers are long, so that the requests press each other."""
        if world.host_blocks:
            opening = [replace(wish, output=1.0) for wish in opening]
        super().begin(world=world, opening=[] if num_turns else opening, is_alike=is_alike)
        if num_turns:
            self.take_turns(prompt=[0, 0], more=[0], num_turns=num_turns, num_alike=2, keeps=keeps)
            for wish in opening:
                self.add(wish, again=False)

    @where(lambda self: self.rig.live and len(self.rig.live) < MAX_LIVE)
    @rule(pick=picks, length=st.integers(1, 20), more=tails(longest=2), steps=st.integers(0, 4), leaves=st.booleans())
    def part_from(self, pick: int, length: int, more: list[int], steps: int, leaves: bool) -> None:
        """A prompt parts from what another request knows where windows and states were released."""
        id = self.rig.live[pick % len(self.rig.live)]
        known = self.rig.known(id, 0)[1]
        if leaves:
            self.rig.abort(id)
        self.add(Wish(known[:length] + more, output=0.4), again=False)
        self.go_on(steps, ())

    @where(lambda self: not self.rig.flights and len(self.rig.live) < MAX_LIVE - 2)
    @rule(
        prompt=tails(longest=5),
        more=tails(longest=3),
        num_turns=st.integers(1, 4),
        num_alike=st.sampled_from([1, 1, 2]),
        keeps=KEEPS,
    )
    def take_turns(self, prompt: list[int], more: list[int], num_turns: int, num_alike: int, keeps: Keeps) -> None:
        """A conversation: a turn is ended, and may be retained; the next one begins with all that it knew."""
        for turn in range(num_turns):
            id = f"r{self.rig.num_added}"
            for number in range(num_alike):
                # Another one parts from it where it ended.
                its = [*prompt[: -len(more) - 2], 1, 0, 1] if number else prompt
                self.add(Wish(its, output=0.4, priority=-1, keeps=keeps[turn % len(keeps)]), again=False)
            for _ in range(2):
                if self.rig.has_work:
                    self.rig.step(ahead=0)
            if id not in self.rig.live or len(self.rig.live) > MAX_LIVE - 2:
                break
            prompt = self.rig.known(id, 0)[1] + more
            self.rig.finish(id)
        self.go_on(2, ())
