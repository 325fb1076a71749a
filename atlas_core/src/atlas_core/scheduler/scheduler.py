"""Continuous batching: every step takes one token of each running sequence, and prompts as far as the budget goes.

Sequences start in order of arrival, when a slot, all pages of what they bring and their pooled resources are free. When
a running one needs a page and none is free, the youngest gives its place up and later computes its tokens again: its
text does not change, since randomness depends on the position only. What a prompt has in common with earlier ones is not
computed again while its pages are there (scheduler.prefix). Steps may be planned before the results of earlier
ones are known; a slot and its pages are reused only after every step that was launched with them has been collected.
"""

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Tokens

from atlas_core.ops.step import Word
from atlas_core.scheduler.admission import accept
from atlas_core.scheduler.allowance import Allowance
from atlas_core.scheduler.limits import Limits
from atlas_core.scheduler.plan import LAST_TOKEN_MARKER, PlanBuilder, StepPlan
from atlas_core.scheduler.prefix import PageStore
from atlas_core.scheduler.ranges import RangePool
from atlas_core.scheduler.sequence import Holding, Restriction, Sequence, State
from atlas_core.scheduler.snapshots import Seat, Snapshots
from atlas_core.vocab.errors import EngineError, RequestError
from atlas_core.vocab.messages import Generate


class Scheduler:
    """Owns every sequence from ``submit`` until it has finished and no step in flight uses its place.

    ``schedule`` plans a step, which must then be launched; ``complete`` takes its sampled tokens, in the order of
    launching.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.preemptions = 0
        self._known: dict[str, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._leaving: list[Sequence] = []
        self._arrivals = 0
        self._stateless = 0
        self._snapshots = Snapshots(limits.places, limits.snapshots // 2) if limits.snapshots else None
        keep = limits.prefix_cache
        self._pages = PageStore(limits.pages, limits.page_tokens, keep=keep, snapshots=self._snapshots)
        self._slots = RangePool(limits.layout.slots)
        self._penalty_rows = RangePool(limits.penalty_rows)
        self._bias = RangePool(limits.layout.bias_pairs)

    @property
    def running(self) -> int:
        """Sequences that hold a slot and go on."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences without a slot, preempted ones included."""
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        """Whether nothing waits, runs or is about to give its place back."""
        return not (self._waiting or self._running or self._leaving)

    @property
    def tokens_used(self) -> int:
        """Positions in pages that are held, in the fullest cache group."""
        return self._pages.used * self.limits.page_tokens

    @property
    def tokens_kept(self) -> int:
        """Positions in pages that nobody holds and that a later prompt may begin with."""
        return self._pages.kept * self.limits.page_tokens

    @property
    def tokens_evicted(self) -> int:
        """Positions in kept pages that were given away, since the start."""
        return self._pages.evicted * self.limits.page_tokens

    @property
    def tokens_total(self) -> int:
        """Positions of the smallest cache group."""
        return min(self.limits.pages, default=0) * self.limits.page_tokens

    @property
    def tokens_stateless(self) -> int:
        """Prompt tokens whose pages were there and that were computed again, since no recurrent state was; since the start."""
        return self._stateless

    def submit(
        self, request: Generate, *, seed: int, stop_ids: Iterable[int], restriction: Restriction | None = None
    ) -> Sequence:
        """Put a request into the line.

        ``stop_ids`` are the tokens that end it; ``seed`` decides its randomness (64 bits); ``restriction`` its choice.

        Raises RequestError when it can never run, when its id is live, or (kind overloaded) when the line is full.
        """
        if request.id in self._known:
            raise RequestError(
                f"request {request.id} is already running", "ids of live requests are unique", field="id"
            )
        free_slots = self.limits.layout.slots - self._slots.used
        if len(self._waiting) - free_slots >= self.limits.max_waiting:
            raise RequestError(
                f"{len(self._waiting)} requests are waiting already",
                "more would only wait longer",
                "try again later",
                kind="overloaded",
                code="queue_full",
                retry_after=self.limits.retry_after,
            )
        sequence = accept(request, self._arrivals, seed=seed, stop_ids=stop_ids, limits=self.limits)
        sequence.restriction = restriction
        self._arrivals += 1
        self._known[sequence.id] = sequence
        self._waiting.append(sequence)
        return sequence

    def find(self, request_id: str) -> Sequence | None:
        """The live sequence with this id."""
        return self._known.get(request_id)

    def live(self) -> tuple[Sequence, ...]:
        """Every sequence that has not finished, in order of arrival."""
        return tuple(self._known.values())

    def finish(self, sequence: Sequence) -> None:
        """End a sequence at any stage: no more is planned for it; what it holds is freed once no step in flight uses it."""
        del self._known[sequence.id]
        sequence.finished = True
        if sequence.state is State.WAITING:
            self._waiting.remove(sequence)
            sequence.state = State.ENDED
        elif sequence.state is State.RUNNING:
            self._leave(sequence)

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing can run before a step in flight is collected (or at all)."""
        before = self.preemptions
        plan = self._next()
        if plan is None and self.preemptions > before and not self._leaving:
            # The only one that ran was in its own way: kept pages that it had to compute again, since no state was kept with them, and
            # the place of the state that it went on from. It has given its own back, and starts anew.
            plan = self._next()
        return plan

    def _next(self) -> StepPlan | None:
        plan = PlanBuilder()
        self._pages.begin_step()
        if self._snapshots is not None:
            self._snapshots.begin_step()
        preempted = self._decode(plan)
        allowance = Allowance(self.limits, plan.rows)
        self._prefill(plan, allowance)
        if not preempted and all(sequence.finished for sequence in self._leaving):
            # Else whoever was put out would come straight back, or be overtaken by those behind.
            self._admit(plan, allowance)
        return plan.build()

    def complete(self, plan: StepPlan, sampled: Tokens[int]) -> list[tuple[Sequence, int]]:
        """Take the tokens sampled by the oldest step in flight, one for each of ``plan.sample_row``.

        Returns those that belong to a sequence that has not finished; the others are surplus of a step that was
        launched before its end was known.
        """
        if len(sampled) != len(plan.sample_row):
            raise EngineError(f"a step sampled {len(sampled)} tokens instead of {len(plan.sample_row)}")
        accepted = []
        for row, token in zip(plan.sample_row, sampled, strict=True):
            if row < 0:
                continue
            sequence = plan.sequences[row]
            sequence.pending -= 1
            if not sequence.finished:
                sequence.tokens.append(token)
                self._share(sequence)
                if sequence.restriction is not None:
                    sequence.restriction.accept(token)
                accepted.append((sequence, token))
        for sequence in plan.sequences:
            sequence.in_flight -= 1
            if sequence.state is State.LEAVING and not sequence.in_flight:
                self._leaving.remove(sequence)
                self._let_go(sequence)
        return accepted

    def check_integrity(self) -> None:
        """Compare every pool with what the sequences hold. Raises EngineError at the first difference."""
        holding = [sequence.holding for sequence in (*self._running, *self._leaving) if sequence.holding]
        if len(holding) != len(self._running) + len(self._leaving) or any(s.holding for s in self._waiting):
            raise EngineError("a running sequence holds nothing, or a waiting one holds something")
        self._pages.check_integrity((h.chain, h.pages) for h in holding)
        if self._snapshots is not None:
            self._snapshots.check_integrity((h.seat for h in holding if h.seat is not None), self._pages.nodes())
        self._slots.check_integrity((h.slot, 1) for h in holding)
        self._penalty_rows.check_integrity((h.penalty_row, 1) for h in holding if h.penalty_row is not None)
        self._bias.check_integrity(h.bias for h in holding if h.bias is not None)
        if [s.order for s in self._waiting] != sorted(s.order for s in self._waiting):
            raise EngineError("the line is out of order")

    def _decode(self, plan: PlanBuilder) -> bool:
        """The next token of every sequence past its prompt. True when somebody had to give up a place."""
        before = self.preemptions
        for sequence in tuple(self._running):
            if sequence.state is not State.RUNNING or sequence.prefilling or sequence.complete:
                continue
            if self._grow(sequence):
                self._row(plan, sequence, 1)
        return self.preemptions > before

    def _prefill(self, plan: PlanBuilder, allowance: Allowance) -> None:
        """Go on with prompts that are under way."""
        for index, sequence in enumerate(self._running):
            if sequence.prefilling and allowance:
                room = self._scores(plan, sum(later.prefilling for later in self._running[index + 1 :]))
                self._row(plan, sequence, allowance.take(_wanted(sequence, room), sequence.computed))

    def _scores(self, plan: PlanBuilder, others: int) -> int:
        """How many logits a sequence may have now, so that ``others`` and those that may start still get the one that each needs."""
        starting = min(len(self._waiting), self.limits.layout.slots - self._slots.used)
        return max(1, self.limits.layout.slots - plan.logits - others - starting)

    def _admit(self, plan: PlanBuilder, allowance: Allowance) -> None:
        """Start waiting sequences in order, as long as the first of them finds everything that it needs."""
        entries = self.limits.max_found
        while self._waiting and allowance:
            sequence = self._waiting[0]
            holding = self._hold(sequence, entries)
            if holding is None:
                return
            self._waiting.popleft()
            sequence.holding = holding
            sequence.state = State.RUNNING
            found = len(holding.chain.nodes)
            entries -= found * len(holding.pages)
            sequence.computed, sequence.prefill_end = found * self.limits.page_tokens, len(sequence.tokens)
            if sequence.found is None:
                sequence.found = sequence.computed
            self._running.append(sequence)
            self._fill_slot(plan, sequence, holding)
            self._row(plan, sequence, allowance.take(_wanted(sequence, self._scores(plan, 0)), sequence.computed))

    def _hold(self, sequence: Sequence, entries: int) -> Holding | None:
        """Everything that a waiting sequence needs to start, or None, with nothing taken.

        A page is left for each running sequence, so that a newcomer does not cost them their place at once. ``entries`` of block
        tables may still be written for pages that are found. Who would compute what this very step computes for another, waits for it.
        """
        if self._slots.used == self.limits.layout.slots:
            return None
        match = self._pages.match(sequence.space, sequence.tokens, sequence.reusable)
        need = self.limits.pages_for(len(sequence.tokens)) - len(match.nodes)
        if match.soon or len(match.nodes) * len(self.limits.pages) > entries:
            return None
        if self._pages.available - match.idle < need + len(self._running):
            return None
        slot = self._slots.allocate(1)
        penalty_row = self._penalty_rows.allocate(1) if sequence.penalised else None
        start = self._bias.allocate(len(sequence.pairs)) if sequence.pairs else None
        missing = slot is None or (sequence.penalised and penalty_row is None) or (sequence.pairs and start is None)
        bias = None if start is None else (start, len(sequence.pairs))
        seat = None
        if self._snapshots is not None and not missing:
            seat = self._snapshots.take(match.nodes[-1] if match.nodes else None)
            missing = seat is None
        if slot is not None and not missing:
            chain, pages = self._pages.take(sequence.space, match, need)
            size, length = self.limits.page_tokens, len(sequence.tokens)
            if sequence.found is None:
                self._stateless += (match.alike - len(match.nodes)) * size
            stops = self.limits.stops(len(match.nodes) * size, match.alike * size, length)
            return Holding(slot, pages, [0] * len(pages), penalty_row, bias, chain, seat, stops)
        if slot is not None:
            self._slots.release(slot, 1)
        if penalty_row is not None:
            self._penalty_rows.release(penalty_row, 1)
        if bias is not None:
            self._bias.release(*bias)
        return None

    def _fill_slot(self, plan: PlanBuilder, sequence: Sequence, holding: Holding) -> None:
        """Write every field of the slot; block table entries follow with the tokens that need them."""
        layout = self.limits.layout
        start, pairs = holding.bias or (0, 0)
        if holding.seat is not None:
            holding.seat.known = holding.seat.reads, holding.seat.writes
        sequence.masked = False
        sequence.bans = sequence.banned > 0 and sequence.generated < sequence.min_new
        words = {
            **sequence.fields,
            Word.POSITION: sequence.computed,
            Word.PENALTY_ROW: -1 if holding.penalty_row is None else holding.penalty_row,
            Word.STATE_IN: holding.slot if holding.seat is None else holding.seat.reads,
            Word.STATE_OUT: holding.slot if holding.seat is None else holding.seat.writes,
            Word.BIAS_START: start,
            Word.BIAS_COUNT: pairs if sequence.bans else pairs - sequence.banned,
        }
        for word, value in words.items():
            plan.update(layout.word(holding.slot, word), value)
        for index, (token, bits) in enumerate(sequence.pairs, start):
            plan.update(layout.bias_start + 2 * index, token)
            plan.update(layout.bias_start + 2 * index + 1, bits)
        if holding.penalty_row is not None and not sequence.computed:
            plan.clear_penalty(holding.penalty_row)
        elif holding.penalty_row is not None:
            prompt = min(sequence.computed, sequence.prompt_length)
            plan.count(holding.penalty_row, sequence.tokens[:prompt], sequence.tokens[prompt : sequence.computed])

    def _row(self, plan: PlanBuilder, sequence: Sequence, count: int) -> None:
        """Plan the sequence's next ``count`` tokens."""
        holding = _held(sequence)
        start, end = sequence.computed, sequence.computed + count
        known = sequence.prefilling
        tokens = sequence.tokens[start:end] if known else [LAST_TOKEN_MARKER]
        sampled = end >= sequence.prefill_end
        layout = self.limits.layout
        for group, pages in enumerate(holding.pages):
            for index in range(holding.tabled[group], self.limits.pages_for(end)):
                plan.update(layout.block(holding.slot, group, index), pages[index])
                holding.tabled[group] = index + 1
        if sampled and sequence.bans and sequence.generated + sequence.pending >= sequence.min_new:
            sequence.bans = False
            plan.update(layout.word(holding.slot, Word.BIAS_COUNT), len(sequence.pairs) - sequence.banned)
        if sampled and sequence.restriction is not None:
            self._mask(plan, sequence, sequence.restriction, holding.slot)
        self._score(plan, sequence, start, end)
        if holding.seat is not None:
            self._places(plan, holding, holding.seat, end, decoding=not known)
        logprobs = sequence.fields[Word.LOGPROBS] >= 0
        plan.row(sequence, holding.slot, tokens, end=end, sampled=sampled, logprobs=logprobs)
        sequence.computed = end
        sequence.pending += sampled
        sequence.in_flight += 1
        self._share(sequence)

    def _places(self, plan: PlanBuilder, holding: Holding, seat: Seat, end: int, *, decoding: bool) -> None:
        """Tell the device where the row's state is and where it goes; where it ends at a stop, the state is left there."""
        assert self._snapshots is not None
        places = seat.reads, seat.writes
        if places != seat.known:
            for word, place in zip((Word.STATE_IN, Word.STATE_OUT), places, strict=True):
                plan.update(self.limits.layout.word(holding.slot, word), place)
            seat.known = places
        if seat.reads != seat.writes:
            self._snapshots.planned(seat)
        if holding.stops and end >= holding.stops[-1]:
            holding.stops.pop()
            self._snapshots.part(seat, end, decoding=False)
        elif decoding and end % self.limits.grain == 0:
            self._snapshots.part(seat, end, decoding=True)

    def _share(self, sequence: Sequence) -> None:
        """Let others use the pages whose tokens are known and given to the device."""
        holding = _held(sequence)
        self._pages.share(holding.chain, sequence.tokens, holding.pages, min(sequence.computed, len(sequence.tokens)))
        seat = holding.seat
        if self._snapshots is not None and seat is not None and seat.parted is not None:
            self._snapshots.settle(seat, seat.parted, holding.chain.nodes, self.limits.page_tokens)

    def _score(self, plan: PlanBuilder, sequence: Sequence, start: int, end: int) -> None:
        """Ask for the log-probabilities of the prompt tokens behind those from ``start`` to ``end``, each once."""
        if sequence.scoring is None:
            return
        for index in range(max(start, sequence.scored), min(end, sequence.prompt_length - 1)):
            plan.score(index - start, sequence.tokens[index + 1], sequence.scoring)
            sequence.scored = index + 1

    def _mask(self, plan: PlanBuilder, sequence: Sequence, restriction: Restriction, slot: int) -> None:
        """Have the slot's mask written, or not looked at, for the next token."""
        wanted = restriction.wanted(sequence.generated + sequence.pending)
        if wanted:
            plan.mask(slot, restriction, late=sequence.pending > 0)
        if wanted != sequence.masked:
            sequence.masked = wanted
            plan.update(self.limits.layout.word(slot, Word.MASK), int(wanted))

    def _grow(self, sequence: Sequence) -> bool:
        """Make room for one more token, by preemption if need be; False when the sequence cannot go on in this step."""
        need = self.limits.pages_for(sequence.computed + 1) - len(_held(sequence).pages[0])
        while need > 0 and self._pages.available < need:
            if self._leaving:
                return False  # pages come back when the steps in flight are collected
            victim = self._running[-1]
            self.preemptions += 1
            self._leave(victim)
            if victim is sequence:
                return False
        if need > 0:
            for pages, more in zip(_held(sequence).pages, self._pages.allocate(need), strict=True):
                pages.extend(more)
        return True

    def _leave(self, sequence: Sequence) -> None:
        """Take a running sequence out of the batch."""
        self._running.remove(sequence)
        sequence.state = State.LEAVING
        if sequence.in_flight:
            self._leaving.append(sequence)
        else:
            self._let_go(sequence)

    def _let_go(self, sequence: Sequence) -> None:
        """Give back what a sequence holds; unless it has finished, it goes to its old place in the line."""
        holding = _held(sequence)
        self._pages.release(holding.chain, holding.pages)
        if self._snapshots is not None and holding.seat is not None:
            self._snapshots.release(holding.seat)
        self._slots.release(holding.slot, 1)
        if holding.penalty_row is not None:
            self._penalty_rows.release(holding.penalty_row, 1)
        if holding.bias is not None:
            self._bias.release(*holding.bias)
        sequence.holding = None
        if sequence.finished:
            sequence.state = State.ENDED
            return
        sequence.state = State.WAITING
        self._waiting.appendleft(sequence)  # it was the youngest of the running, so older than all who wait


def _wanted(sequence: Sequence, room: int) -> int:
    """Tokens of a prompt up to its next stop or its end, with at most ``room`` tokens whose logits are wanted."""
    stops = _held(sequence).stops
    count = (stops[-1] if stops else sequence.prefill_end) - sequence.computed
    if not sequence.unscored:
        return count
    return min(count, max(0, sequence.scored - sequence.computed) + room)


def _held(sequence: Sequence) -> Holding:
    if sequence.holding is None:
        raise EngineError(f"sequence {sequence.id} is {sequence.state.name.lower()} and holds no slot")
    return sequence.holding
