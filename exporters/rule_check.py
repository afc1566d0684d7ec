"""Which rules of Prometheus can never give a result, because no series feeds them.

Expressions are parsed by promql-parser, Prometheus' grammar in Rust (`warpwatch[rules]`). Of each expression is worked
out whether it may have a result at all, and which words its labels may hold, from the series that exist and the words
that these can have. What is not known may be anything: a metric of another program, a label that Prometheus adds to a
target, a threshold. So a rule that is named here cannot fire; one that is not named may still never do so.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from agent.errors import UsageError

#: Functions that give a result without a series: `absent` above all because there is none.
_WITHOUT_SERIES: Final = frozenset({"absent", "absent_over_time", "time", "vector", "scalar", "pi"})
_PREFIXES: Final = ("warpwatch_", "DCGM_")
_LABEL_OF_METRIC: Final = "__name__"

#: Words that a label may hold, by label; one that is not there may hold anything. None: there is no series.
Words = Mapping[str, frozenset[str]]
Possible = Words | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule of a file, as far as it matters here."""

    file: Path
    group: str
    name: str  # of the alert or of the series that is recorded
    is_alert: bool
    expr: str
    labels: Mapping[str, str] = field(default_factory=dict)  # that the rule gives to what it records


@dataclass(frozen=True, slots=True, kw_only=True)
class Silent:
    """A rule that can never give a result, and why."""

    rule: Rule
    why: str


@dataclass(slots=True)
class Feeds:
    """The series that exist: families with the words of their labels, and those that a configuration leaves out."""

    words: dict[str, Words]
    #: Why a family that could be exported is not.
    missing: Mapping[str, str] = field(default_factory=dict)


def read_rules(path: Path) -> list[Rule]:
    """Return the rules of a file; raises UsageError where it is no file of rules, or an extra is not installed."""
    try:
        import yaml
    except ImportError as error:
        raise _missing("PyYAML") from error
    try:
        content = yaml.safe_load(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no YAML: {' '.join(str(error).split())[:200]}") from error
    if isinstance(content, dict) and content.get("kind") == "PrometheusRule":
        content = content.get("spec")
    groups = content.get("groups") if isinstance(content, dict) else None
    if not isinstance(groups, list):
        raise UsageError(f"{path} is no file of rules: it has no list `groups`")
    return [_rule(path, group, entry) for group in groups for entry in _entries(path, group)]


def silent_rules(rules: Sequence[Rule], feeds: Feeds) -> list[Silent]:
    """Return the rules that can never give a result, in their order; `feeds` learns what is recorded.

    Raises UsageError for an expression that is no PromQL.
    """
    parsed = [(rule, _parse(rule)) for rule in rules]
    recorded = {rule.name for rule in rules if not rule.is_alert}
    # Rules may read what stands after them; a round that learns nothing is the last.
    while any(_learn(rule, expression, feeds) for rule, expression in parsed if not rule.is_alert):
        pass
    found: list[Silent] = []
    for rule, expression in parsed:
        reader = _Reader(feeds, recorded)
        if reader.read_of(rule, expression) is None:
            found.append(Silent(rule=rule, why="; ".join(dict.fromkeys(reader.why)) or "it has no result"))
    return found


def _learn(rule: Rule, expression: Any, feeds: Feeds) -> bool:  # noqa: ANN401 - the parser has no types
    """Add what a rule records to what is known; several rules may record one name. Return whether this was new."""
    possible = _Reader(feeds).read_of(rule, expression)
    if possible is None:
        return False
    words: Words = {**possible, **{label: frozenset({value}) for label, value in rule.labels.items()}}
    known = feeds.words.get(rule.name)
    joined = words if known is None else _either(known, words)
    feeds.words[rule.name] = joined
    return joined != known


class _Reader:
    """Works out what an expression may give; `why` tells what was found to have no series."""

    def __init__(self, feeds: Feeds, recorded: Iterable[str] = ()) -> None:
        self._feeds = feeds
        self._recorded = frozenset(recorded)
        self.why: list[str] = []

    def read_of(self, rule: Rule, expression: Any) -> Possible:  # noqa: ANN401 - the parser has no types
        try:
            return self.read(expression)
        except RecursionError as error:
            raise UsageError(f"{rule.file}: {rule.name}: its expression is nested too deeply to be checked") from error

    def read(self, expression: Any) -> Possible:  # noqa: ANN401
        kind = type(expression).__name__
        reader: Callable[[Any], Possible] | None = getattr(self, f"_{kind.lower()}", None)
        return reader(expression) if reader is not None else {}

    def _parenexpr(self, expression: Any) -> Possible:  # noqa: ANN401
        return self.read(expression.expr)

    _unaryexpr = _parenexpr
    _subqueryexpr = _parenexpr

    def _matrixselector(self, expression: Any) -> Possible:  # noqa: ANN401
        return self.read(expression.vector_selector)

    def _binaryexpr(self, expression: Any) -> Possible:  # noqa: ANN401
        operator = str(expression.op)
        left = self.read(expression.lhs)
        if operator == "unless":
            return left
        if operator == "or":
            right = self.read(expression.rhs)
            return right if left is None else left if right is None else _either(left, right)
        right = self.read(expression.rhs)
        if left is None or right is None:
            return None
        if type(expression.lhs).__name__ == "NumberLiteral":
            return right
        modifier = expression.modifier
        many = "OneToMany" in str(getattr(modifier, "card", ""))
        # What group_left and group_right name comes from the other side, or is empty where that has none.
        copied = set(_copied(modifier))
        return {name: words for name, words in (right if many else left).items() if name not in copied}

    def _aggregateexpr(self, expression: Any) -> Possible:  # noqa: ANN401
        inner = self.read(expression.expr)
        operator = str(expression.op)
        if inner is None or operator in {"topk", "bottomk", "limitk"}:
            return inner
        modifier = expression.modifier
        if modifier is None or operator == "count_values":  # which writes a label of its own
            return {}
        labels = set(modifier.labels)
        keeps = str(modifier.type).endswith("By")
        return {name: words for name, words in inner.items() if (name in labels) == keeps}

    def _call(self, expression: Any) -> Possible:  # noqa: ANN401
        name = expression.func.name
        if name in _WITHOUT_SERIES or not expression.args:
            return {}
        vectors = [one for one in expression.args if type(one).__name__ not in {"NumberLiteral", "StringLiteral"}]
        found = [self.read(one) for one in vectors]
        if any(one is None for one in found):
            return None
        words = dict(found[-1] or {}) if found else {}
        if name in {"label_replace", "label_join"}:
            words.pop(expression.args[1].val, None)
        return words

    def _vectorselector(self, expression: Any) -> Possible:  # noqa: ANN401
        matchers = [(str(one.op).partition(".")[2], one.name, one.value) for one in expression.matchers.matchers]
        names = [value for operator, label, value in matchers if label == _LABEL_OF_METRIC and operator == "Equal"]
        name = expression.name or (names[0] if names else None)
        if name is None:
            return {}
        words = self._words_of(name)
        if words is None:
            return None
        kept = dict(words)
        for operator, label, value in matchers:
            if label not in kept:
                continue
            kept[label] = frozenset(word for word in kept[label] if _matches(operator, value, word))
            if not kept[label]:
                self.why.append(f"no series of {name} has {label} {_SIGNS[operator]}{value!r}")
                return None
        return kept

    def _words_of(self, name: str) -> Possible:
        found = self._feeds.words.get(name)
        if found is not None:
            return found
        if name in self._feeds.missing:
            self.why.append(f"{name} is not exported: {self._feeds.missing[name]}")
        elif name in self._recorded:
            self.why.append(f"{name} is recorded by a rule that can never give a result")
        elif ":" in name:
            self.why.append(f"no rule of these files records {name}; check the file that does together with this one")
        elif name.startswith(_PREFIXES):
            near = difflib.get_close_matches(name, self._feeds.words, n=1)
            self.why.append(f"there is no metric {name}" + (f"; did you mean {near[0]}?" if near else ""))
        else:
            return {}  # of another program
        return None


_SIGNS: Final = {"Equal": "", "NotEqual": "not ", "Re": "like ", "NotRe": "not like "}


def _matches(operator: str, value: str, word: str) -> bool:
    if operator in {"Equal", "NotEqual"}:
        return (word == value) == (operator == "Equal")
    try:
        return (re.fullmatch(value, word) is not None) == (operator == "Re")
    except re.error:
        return True  # Prometheus' expressions know what Python's do not


def _copied(modifier: Any) -> Sequence[str]:  # noqa: ANN401
    labels = getattr(modifier, "group_labels", None)
    return tuple(labels) if labels is not None else ()


def _either(left: Words, right: Words) -> Words:
    return {name: left[name] | right[name] for name in left.keys() & right.keys()}


def _entries(path: Path, group: object) -> list[Any]:
    rules = group.get("rules") if isinstance(group, dict) else None
    if not isinstance(rules, list):
        raise UsageError(f"{path} is no file of rules: a group has no list `rules`")
    return rules


def _rule(path: Path, group: Mapping[str, Any], entry: object) -> Rule:
    if isinstance(entry, dict):
        name, labels = entry.get("alert") or entry.get("record"), entry.get("labels") or {}
        if not isinstance(labels, dict):
            raise UsageError(f"{path} is no file of rules: the labels of {name} are no mapping")
        if isinstance(name, str) and "expr" in entry:
            return Rule(
                file=path,
                group=str(group.get("name", "")),
                name=name,
                is_alert="alert" in entry,
                expr=str(entry["expr"]),
                labels={str(label): str(value) for label, value in labels.items()},
            )
    raise UsageError(f"{path} is no file of rules: a rule has no `alert` or `record`, or no `expr`")


def _parse(rule: Rule) -> Any:  # noqa: ANN401
    try:
        import promql_parser
    except ImportError as error:
        raise _missing("promql-parser") from error
    try:
        return promql_parser.parse(rule.expr)
    except ValueError as error:
        raise UsageError(f"{rule.file}: {rule.name}: {error}") from error


def _missing(name: str) -> UsageError:
    return UsageError(f"checking rules needs {name}; install warpwatch[rules]")
