"""The operations of a step as a graph, and the memory that MLX takes to run them: nothing is computed.

MLX runs a graph from its outputs backwards, level by level, 20 operations wide at most, so that most are run as late as
they can be. It allocates what an operation makes when it hands it to the device, and frees an array when the last
operation that reads it has run. An elementwise operation writes over an input of its own size that nothing else reads.
The program is ahead of the device by some operations, and all that those read and make is alive: it is why a step takes
more than one would count by hand.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

_WIDTH = 20  # MLX_BFS_MAX_WIDTH of MLX 0.32.4


class Lead(NamedTuple):
    """How far the program is ahead of the device: tasks that were begun and not finished, and what a task holds at
    most: commands, and elements that they read. views: whether an operation that only looks at an array otherwise
    (transposed, sliced) is a command, as on a CPU, where any other one is two."""

    tasks: int
    commands: int
    elements: float
    views: bool


@dataclass(eq=False, slots=True)
class Buffer:
    """What an operation makes.

    size: bytes; scratch: more of them, while it runs. part: of the forecast that they count for. item: bytes of an
    element. over: in the place of an input if it can be. view: only another look at the first input. given: there from
    the beginning. commands: of the operation on a CPU. reads: elements beside those of the inputs, of weights. members:
    what a kernel makes together. stream: that runs it.
    """

    size: int
    part: str
    inputs: tuple["Buffer", ...] = ()
    scratch: int = 0
    item: int = 4
    over: bool = False
    view: bool = False
    given: bool = False
    commands: int = 2
    reads: float = 0
    members: tuple["Buffer", ...] = ()
    stream: int = 0


@dataclass
class Task:
    """Of a stream, while it is put together: what it holds, and its first and last operation."""

    first: int
    last: int = 0
    held: list[Buffer] = field(default_factory=list)
    commands: int = 0
    elements: float = 0


@dataclass
class Peak:
    """The most bytes alive at once, and what they were for, by part; most: of every part at its own peak."""

    size: int = 0
    parts: dict[str, int] = field(default_factory=dict)
    most: dict[str, int] = field(default_factory=dict)


class Tape:
    """Makes the graph; `play` runs it. part: what is made from now on counts for it; stream: runs it. item: bytes of an
    element, unless it is said."""

    def __init__(self, item: int = 4) -> None:
        self.part, self.item, self.stream = "", item, 0
        self._given: list[Buffer] = []
        self._outputs: list[Buffer] = []
        self._held: list[Buffer] = []

    def given(self, size: float, part: str) -> Buffer:
        """Memory that is there from the beginning, until it was read for the last time."""
        buffer = Buffer(int(size), part, item=self.item, given=True)
        self._given.append(buffer)
        return buffer

    def make(
        self,
        size: float,
        *inputs: Buffer,
        scratch: float = 0,
        views: int = 0,
        commands: int = 2,
        reads: float = 0,
        item: int | None = None,
        part: str | None = None,
    ) -> Buffer:
        """What a product, a copy, a reduction or a kernel makes of its inputs.

        Args:
            size: bytes; 0 for what is too small to count. views: of the first input that are made on the way.
        """
        made = Buffer(int(size), self._part(part), self._viewed(inputs, views), int(scratch), item or self.item)
        made.commands, made.reads, made.stream = commands, reads, self.stream
        return made

    def over(
        self,
        size: float,
        *inputs: Buffer,
        views: int = 0,
        commands: int = 2,
        item: int | None = None,
        part: str | None = None,
    ) -> Buffer:
        """What an elementwise operation makes, in the place of an input if it can be."""
        made = Buffer(int(size), self._part(part), self._viewed(inputs, views), item=item or self.item, over=True)
        made.commands, made.stream = commands, self.stream
        return made

    def kernel(
        self, sizes: Sequence[float], *inputs: Buffer, item: int | None = None, part: str | None = None
    ) -> tuple[Buffer, ...]:
        """What one kernel makes together."""
        joint, own = Buffer(0, self._part(part), inputs), self._part(part)
        item = item or self.item
        joint.members = tuple(Buffer(int(size), own, (joint,), item=item, view=True) for size in sizes)
        return joint.members

    def view(self, x: Buffer, *after: Buffer) -> Buffer:
        """Another look at x; after: what it waits for."""
        return Buffer(x.size, x.part, (x, *after), item=x.item, view=True, stream=self.stream)

    def small(self, operations: int, *inputs: Buffer, views: int = 0) -> Buffer:
        """So many operations, one after the other, whose results are too small to count."""
        last = self.make(0, *inputs, views=views)
        for _ in range(operations - 1):
            last = self.make(0, last)
        return last

    def output(self, *buffers: Buffer) -> None:
        """They are asked for, and alive to the end."""
        self._outputs += buffers

    def hold(self, *buffers: Buffer) -> None:
        """They are alive to the end without being asked for."""
        self._held += buffers

    def _part(self, part: str | None) -> str:
        return self.part if part is None else part

    def _viewed(self, inputs: tuple[Buffer, ...], views: int) -> tuple[Buffer, ...]:
        if not inputs:
            return inputs
        first, *rest = inputs
        for _ in range(views):
            first = self.view(first)
        return (first, *rest)

    def order(self) -> list[Buffer]:
        """As MLX schedules: breadth first from the outputs, but not wider than it allows, and then backwards."""
        edges: dict[Buffer, int] = {}
        todo = list(self._outputs)
        for buffer in self._outputs:
            edges[buffer] = edges.get(buffer, 0) + 1
        seen: set[Buffer] = set()
        while todo:
            buffer = todo.pop()
            if buffer not in seen:
                seen.add(buffer)
                for x in buffer.inputs:
                    edges[x] = edges.get(x, 0) + 1
                    todo.append(x)
        found = [Buffer(0, "", tuple(self._outputs))]
        waiting: list[tuple[Buffer, int]] = []
        at = 0
        while at < len(found) or waiting:
            if at < len(found):
                buffer, start = found[at], 0
                at += 1
            else:
                buffer, start = waiting.pop()
            for j in range(start, len(buffer.inputs)):
                x = buffer.inputs[j]
                if x.given:
                    continue
                if len(found) - at >= _WIDTH:
                    waiting.append((buffer, j))
                    break
                edges[x] -= 1
                if not edges[x]:
                    found.append(x)
        return found[:0:-1]

    def play(self, lead: Lead, limit: float = float("inf")) -> Peak:
        """Run it. limit: bytes above which the program waits for the device."""
        return _Player(self.order(), self._given, [*self._outputs, *self._held]).play(lead, limit)


class _Player:
    """One run of a graph."""

    def __init__(self, order: list[Buffer], given: list[Buffer], kept: list[Buffer]) -> None:
        self.order, self.kept = order, set(kept)
        self.last: dict[Buffer, int] = {}
        for index, made in enumerate(order):
            for buffer in made.inputs:
                self.last[buffer] = index
        self.owners: dict[Buffer, Buffer] = {}  # in whose memory a buffer lies
        self.users: dict[Buffer, int] = {}  # live buffers, and operations in flight that read them, by owner
        self.parts: dict[str, int] = {}
        self.live, self.peak, self.most = 0, Peak(), dict[str, int]()
        for buffer in given:
            self.allocate(buffer, buffer.size)

    def play(self, lead: Lead, limit: float) -> Peak:
        flight: deque[list[Buffer]] = deque()
        tasks: dict[int, Task] = {}
        for index, made in enumerate(self.order):
            task = tasks.setdefault(made.stream, Task(index))
            task.last = index
            task.held += self.run(index, made)
            if lead.views:
                task.commands += 1 if made.view else made.commands
            elif not made.view:
                task.commands += 1
                task.elements += made.reads + sum(b.size / b.item for b in made.inputs)
            if task.commands >= lead.commands or task.elements > lead.elements or (task.held and self.live > limit):
                # What other streams were given before it has run by then.
                ended = [made.stream, *(s for s, other in tasks.items() if other.last < task.first)]
                flight.append([owner for stream in ended for owner in tasks.pop(stream).held])
                while flight and (len(flight) > lead.tasks or self.live > limit):
                    for owner in flight.popleft():
                        self.release(owner)
        return self.peak

    def run(self, index: int, made: Buffer) -> list[Buffer]:
        """Hand an operation to the device; returns the owners that it holds until it has run."""
        read = dict.fromkeys(made.inputs)
        if made in self.owners:  # a member of a kernel, which was allocated with it
            taken = None
        else:
            taken = made.inputs[0] if made.view else None
            if made.over:
                taken = next((b for b in read if self.can_take(b, made, index)), None)
            if taken is None:
                self.allocate(made, made.size)
            else:
                self.owners[made] = owner = self.owners[taken]
                self.users[owner] += 1
                if made.over and made.part != owner.part:
                    self.parts[owner.part] -= owner.size
                    self._count(made.part, owner.size)
                    owner.part = made.part
        held = [self.owners[b] for b in read if b is not taken]
        for member in made.members:
            self.allocate(member, member.size)
        if made.scratch:
            scratch = Buffer(made.scratch, made.part)
            self.allocate(scratch, scratch.size)
            held.append(self.owners.pop(scratch))
            self.users[scratch] -= 1
        for owner in held:
            self.users[owner] += 1
        # The program forgets what is not read again, but what an operation in flight holds is alive.
        unread = [m for m in (made, *made.members) if m not in self.last and m not in self.kept]
        for buffer in (*(b for b in read if self.last[b] == index and b not in self.kept), *unread):
            owner = self.owners.pop(buffer)
            if buffer in unread:
                self.users[owner] += 1
                held.append(owner)
            self.release(owner)
        return held

    def can_take(self, buffer: Buffer, made: Buffer, index: int) -> bool:
        owner = self.owners[buffer]
        last = self.last[buffer] == index and buffer not in self.kept
        return last and owner.size == made.size and self.users[owner] == 1

    def allocate(self, buffer: Buffer, size: int) -> None:
        self.owners[buffer], self.users[buffer] = buffer, 1
        self.live += size
        self._count(buffer.part, size)
        if self.live > self.peak.size:
            self.peak = Peak(self.live, dict(self.parts), self.most)

    def _count(self, part: str, size: int) -> None:
        self.parts[part] = self.parts.get(part, 0) + size
        self.most[part] = max(self.most.get(part, 0), self.parts[part])

    def release(self, owner: Buffer) -> None:
        self.users[owner] -= 1
        if not self.users[owner]:
            self.live -= owner.size
            self.parts[owner.part] -= owner.size
