"""Which block follows which, kept once for all slots of a tier.

A slot's blocks are *closed* when the parent of each is there too; only then may a match search by halves instead of
walking. What breaks that is a removal: does the removed block still have a child on that slot? Most blocks have one
child, so `child` answers with one look-up. A block with more is *forked* and counts, per slot, the children which are
there; its children (*twigs*) know their parent, so that the count follows them. Memory a block: one entry of `child`.

Links may outlive their parent (a *ghost*: gone everywhere while a child lives on), because it can be stored again.
A hash names its whole prefix, so a block has one parent; being told another is a contradiction, see `TierIndex`.
"""

from __future__ import annotations

from collections.abc import Callable

# Not hashes, which are unsigned. First blocks are twigs of ROOT, which is always forked.
ROOT = -1
FORKED = -2

_GHOSTS_UNPRUNED = 1024

Masks = Callable[[int], int]
"""Slots that have a block, as a bit mask; 0 when none has."""


def bits(mask: int) -> list[int]:
    """The single bits of a mask, lowest first."""
    found: list[int] = []
    while mask:
        low = mask & -mask
        found.append(low)
        mask ^= low
    return found


class Fork:
    """Children of a forked block: all that live, and how many of them each slot (by its bit) has."""

    __slots__ = ("children", "counts")

    def __init__(self) -> None:
        self.children: set[int] = set()
        self.counts: dict[int, int] = {}

    def add(self, child: int, mask: int) -> None:
        self.children.add(child)
        for bit in bits(mask):
            self.counts[bit] = self.counts.get(bit, 0) + 1

    def lose(self, bit: int) -> None:
        left = self.counts.get(bit, 0) - 1
        if left > 0:
            self.counts[bit] = left
        else:
            self.counts.pop(bit, None)


class ChainLinks:
    """`child` is read and set in place by TierIndex's loops; everything else goes through methods."""

    __slots__ = ("_masks", "_prune_at", "child", "forks", "ghosts", "twigs")

    def __init__(self, masks: Masks) -> None:
        self._masks = masks
        self.child: dict[int, int] = {ROOT: FORKED}
        """Parent -> its only child, or FORKED. The child may be dead: then it stands for none."""
        self.forks: dict[int, Fork] = {ROOT: Fork()}
        self.twigs: dict[int, int] = {}
        """Child of a forked block -> that block."""
        self.ghosts: set[int] = set()
        """Keys of `child` that no slot has."""
        self._prune_at = _GHOSTS_UNPRUNED

    def link(self, parent: int, child: int) -> None:
        """Take in a block that just appeared in the tier and is not `parent`'s known only child."""
        present = self.child.get(parent)
        if present == FORKED:
            self._add_twig(parent, child)
        elif present is None or not self._masks(present):
            self.child[parent] = child
        else:
            self.forks[parent] = Fork()
            self.child[parent] = FORKED
            # A dead link that came back to life under another parent stays with that one.
            if present not in self.twigs:
                self._add_twig(parent, present)
            self._add_twig(parent, child)

    def _add_twig(self, parent: int, child: int) -> None:
        self.twigs[child] = parent
        self.forks[parent].add(child, self._masks(child))

    def gained(self, parent: int, child: int, bit: int) -> bool:
        """One more slot has `child`, a twig, under `parent`. False: the links say otherwise."""
        if self.twigs.get(child) != parent:
            return False
        counts = self.forks[parent].counts
        counts[bit] = counts.get(bit, 0) + 1
        return True

    def lost(self, child: int, bit: int) -> None:
        """A slot no longer has `child`."""
        parent = self.twigs.get(child)
        if parent is not None:
            self.forks[parent].lose(bit)

    def children_on(self, block: int, bit: int) -> int:
        """How many children of `block` the slot has."""
        child = self.child.get(block)
        if child is None:
            return 0
        if child == FORKED:
            return self.forks[block].counts.get(bit, 0)
        return 1 if self._masks(child) & bit else 0

    def haunt(self, block: int) -> None:
        """`block` is named as a parent and no slot has it."""
        self.ghosts.add(block)
        if len(self.ghosts) > self._prune_at:
            self._prune()

    def forget(self, block: int) -> None:
        """The last slot lost `block`; its own link stays while a child lives."""
        parent = self.twigs.pop(block, None)
        if parent is not None:
            self._drop_twig(parent, block)
        child = self.child.get(block)
        if child is None:
            return
        if child == FORKED or self._masks(child):
            self.haunt(block)
        else:
            del self.child[block]

    def _drop_twig(self, parent: int, child: int) -> None:
        children = self.forks[parent].children
        children.discard(child)
        if not children and parent != ROOT:
            del self.forks[parent]
            del self.child[parent]
            self.ghosts.discard(parent)

    def _prune(self) -> None:
        """Forget ghosts whose only child died. Runs when their number has doubled, so O(1) a ghost."""
        for ghost in [g for g in self.ghosts if self.child.get(g) != FORKED]:
            child = self.child.get(ghost)
            if child is None or not self._masks(child):
                self.child.pop(ghost, None)
                self.ghosts.discard(ghost)
        self._prune_at = 2 * len(self.ghosts) + _GHOSTS_UNPRUNED

    def check_integrity(self) -> None:
        assert self.ghosts == {
            parent for parent in self.child if parent != ROOT and not self._masks(parent)
        }, "ghosts are the linked parents that no slot has"
        assert set(self.forks) == {p for p, c in self.child.items() if c == FORKED}
        owned: dict[int, int] = {}
        for parent, fork in self.forks.items():
            counts: dict[int, int] = {}
            for child in fork.children:
                owned[child] = parent
                mask = self._masks(child)
                assert mask, "a twig lives"
                for bit in bits(mask):
                    counts[bit] = counts.get(bit, 0) + 1
            assert counts == fork.counts, "a fork counts its children a slot"
        assert owned == self.twigs
