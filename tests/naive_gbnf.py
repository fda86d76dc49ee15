"""GBNF written for obviousness: what a grammar lets follow a text, and texts made at random.

A state is the set of all ways on: stacks of what is still to come, the next element first. Knows
literals, classes, groups, alternatives, rule names, repetitions and comments at line ends.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field

ESCAPES = {"t": "\t", "r": "\r", "n": "\n"}
HEX = {"x": 2, "u": 4, "U": 8}


@dataclass(frozen=True)
class Chars:
    ranges: tuple[tuple[int, int], ...]
    negated: bool = False

    def has(self, char: str) -> bool:
        return any(a <= ord(char) <= b for a, b in self.ranges) != self.negated

    def one(self, rng: random.Random) -> str:
        if self.negated:
            return next(c for c in iter(lambda: chr(rng.choice(POOL)), None) if self.has(c))
        low, high = rng.choice(self.ranges)
        return chr(rng.randint(low, high))


POOL = [*range(1, 128), 0xE9, 0x65E5, 0x1F389]


@dataclass(frozen=True)
class Rule:
    name: str


Element = Chars | Rule
Stack = tuple[Element, ...]
State = frozenset[Stack]


@dataclass
class Grammar:
    rules: dict[str, list[Stack]] = field(default_factory=dict)
    root: str = "root"

    # -- asking

    def start(self) -> State:
        return self._settled([(Rule(self.root),)])

    def after(self, state: State, text: str) -> State:
        """The state after more text; empty where the grammar does not allow that."""
        for char in text:
            taken = [s[1:] for s in state if s and isinstance(s[0], Chars) and s[0].has(char)]
            state = self._settled(taken)
        return state

    def matches(self, text: str) -> bool:
        return () in self.after(self.start(), text)

    def sample(self, rng: random.Random, depth: int = 0, name: str | None = None) -> str:
        """A text of the language; deeper rules prefer their shortest alternatives."""
        alternatives = self.rules[name or self.root]
        if depth > 30:
            alternatives = [min(alternatives, key=lambda s: self._depth(s, 0))]
        parts = []
        for element in rng.choice(alternatives):
            if isinstance(element, Rule):
                parts.append(self.sample(rng, depth + 1, element.name))
            else:
                parts.append(element.one(rng))
        return "".join(parts)

    def _depth(self, stack: Stack, level: int) -> int:
        """How deep the shallowest way through these elements goes; 99 for too deep."""
        if level > 12:
            return 99
        return max(
            (
                1 + min(self._depth(s, level + 1) for s in self.rules[e.name])
                for e in stack
                if isinstance(e, Rule)
            ),
            default=0,
        )

    def _settled(self, stacks: list[Stack]) -> State:
        """Replace rules on top by their alternatives until characters are on top."""
        found: set[Stack] = set()
        seen: set[Stack] = set()
        waiting = list(stacks)
        while waiting:
            stack = waiting.pop()
            if stack in seen:
                continue
            seen.add(stack)
            if stack and isinstance(stack[0], Rule):
                waiting += [(*way, *stack[1:]) for way in self.rules[stack[0].name]]
            else:
                found.add(stack)
        return frozenset(found)

    # -- reading

    @classmethod
    def parse(cls, text: str) -> Grammar:
        grammar = cls()
        for line in text.splitlines():
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            name, _, body = line.partition("::=")
            reader = _Reader(grammar, name.strip(), body.strip())
            grammar.rules[name.strip()] = reader.alternatives()
            assert not reader.rest, f"{name}: left over: {reader.rest}"
        names = {e.name for ways in grammar.rules.values() for w in ways for e in w
                 if isinstance(e, Rule)}  # fmt: skip
        assert names | {grammar.root} <= set(grammar.rules), names - set(grammar.rules)
        return grammar


class _Reader:
    def __init__(self, grammar: Grammar, name: str, text: str) -> None:
        self.grammar = grammar
        self.name = name
        self.rest = text

    def alternatives(self) -> list[Stack]:
        ways = [self.sequence()]
        while self.take("|"):
            ways.append(self.sequence())
        return ways

    def sequence(self) -> Stack:
        elements: list[Element] = []
        while self.rest and self.rest[0] not in "|)":
            piece = self.repeated(self.atom())
            elements += piece
        return tuple(elements)

    def atom(self) -> Stack:
        if self.take("(", spaces=True):
            inner = self.alternatives()
            assert self.take(")")
            return (self.new_rule(inner),)
        if self.take('"', spaces=False):
            chars = []
            while not self.take('"'):
                code = self.char()
                chars.append(Chars(((code, code),)))
            return tuple(chars)
        if self.take("[", spaces=False):
            negated = self.take("^", spaces=False)
            ranges = []
            while not self.take("]"):
                low = high = self.char()
                if self.rest[0] == "-" and self.rest[1] != "]":
                    self.rest = self.rest[1:]
                    high = self.char()
                ranges.append((low, high))
            return (Chars(tuple(ranges), negated),)
        found = re.match(r"[a-zA-Z0-9-]+", self.rest)
        assert found, f"{self.name}: cannot read {self.rest}"
        self.rest = self.rest[found.end() :].lstrip()
        return (Rule(found[0]),)

    def repeated(self, atom: Stack) -> Stack:
        found = re.match(r"[*+?]|\{(\d+)(,?)(\d*)\}", self.rest)
        if not found:
            return atom
        self.rest = self.rest[found.end() :].lstrip()
        low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(found[0], (None, None))
        if low is None:
            low = int(found[1])
            high = (int(found[3]) if found[3] else None) if found[2] else low
        more: Stack
        if high is None:
            name = self.fresh()
            self.grammar.rules[name] = [(*atom, Rule(name)), ()]
            more = (Rule(name),)
        else:
            more = ()
            for _ in range(high - low):
                more = (self.new_rule([(*atom, *more), ()]),)
        return (*(atom * low), *more)

    def fresh(self) -> str:
        return f"{self.name}_{len(self.grammar.rules)}"

    def new_rule(self, ways: list[Stack]) -> Rule:
        name = self.fresh()
        self.grammar.rules[name] = ways
        return Rule(name)

    def char(self) -> int:
        if self.rest[0] != "\\":
            code, self.rest = ord(self.rest[0]), self.rest[1:]
            return code
        kind = self.rest[1]
        if kind in HEX:
            n = HEX[kind]
            code, self.rest = int(self.rest[2 : 2 + n], 16), self.rest[2 + n :]
            return code
        assert kind in '\\"[]-' or kind in ESCAPES, f"unknown escape {kind}"
        self.rest = self.rest[2:]
        return ord(ESCAPES.get(kind, kind))

    def take(self, text: str, *, spaces: bool = True) -> bool:
        found = self.rest.startswith(text)
        if found:
            self.rest = self.rest[len(text) :]
            if spaces:
                self.rest = self.rest.lstrip()
        return found
