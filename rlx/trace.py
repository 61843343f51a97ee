"""What was said and sampled in a rollout: a tree of messages, each stored once with the tokens that it adds to those before it.

    node  parent  message                  token_ids                    sampled
    0     -1      user "3 + 4?"
    1      0      assistant, call add      11 12 13 | 21 22             yes: the prompt's three tokens, and the two of the answer
    2      1      tool "7"
    3      2      assistant "7"            31 32 | 41                   yes: what the tool's reply adds to the prompt, and the answer

A path from a first node to an answer is the conversation that the policy continued there, token for token. A request whose prompt begins
with an earlier answer's tokens continues it; any other prompt (a rewritten history, reasoning that a template leaves out, another agent)
begins a path of its own. So a rollout of 100 turns takes the memory of its last prompt. Training samples, what `rlx view` shows, rows of
`rlx synthesize` and the records of a step are cuts of this.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlx.arrays import Float, Int

NO_IDS = np.empty(0, np.int32)
NO_LOGPROBS = np.empty(0, np.float32)
START = -1  # the parent of a first node


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request to the policy: tokens in, tokens out, each new token with its version."""

    prompt_ids: Int  # [P]
    completion_ids: Int  # [C]
    logprobs: Float  # [C] log-probability of each sampled token under the policy that sampled it, at `temperature`
    versions: Int  # [C] policy version that sampled each token
    temperature: float  # the one that the tokens were sampled and `logprobs` computed at; 1 if the most likely tokens were taken
    finish_reason: str  # "stop", "length" or "abort"
    teacher_prompt_ids: Int | None = None  # [P'] the prompt with a demonstration, as the teacher of self-distillation reads it
    observation_mask: Int | None = None  # [P] marks of what the environment answered (`rlx.policy.observation_mask`); None: not asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One message of a trace, and the tokens that it adds."""

    parent: int  # the node before it; START: none
    message: Any  # role, content, …, as the environment or the policy wrote it
    token_ids: Int = field(default_factory=lambda: NO_IDS)  # [n] an answer's node has all tokens since the answer before it
    sampled: bool = False  # an answer of the policy that counts; its tokens may be unknown (an endpoint that returns none)
    logprobs: Float = field(default_factory=lambda: NO_LOGPROBS)  # [k] of its last k tokens, which the policy sampled; see `Turn`
    versions: Int = field(default_factory=lambda: NO_IDS)  # [m] the policy versions that sampled them, in order
    ends: Int = field(default_factory=lambda: NO_IDS)  # [m] how many of the k tokens were sampled up to the end of each version
    temperature: float = 1.0
    finish_reason: str = ""
    tools: Any = None  # functions that the request offered, where they are others than those of the nodes before; None: as these
    teacher_prompt_ids: Int | None = None  # in the first answer of a path: what stands in the place of its prompt for a teacher; see `Turn`
    observation_mask: Int | None = None  # [n] marks of what the environment answered; see `Turn`

    @property
    def token_versions(self) -> Int:
        """[k] the version that sampled each token."""
        return np.repeat(self.versions, np.diff(self.ends, prepend=0)).astype(np.int32, copy=False)


@dataclass(slots=True)
class Branch:
    """The nodes of one training sample: a path, and the answers in it that belong to this sample and to no other."""

    path: list[int]
    own: set[int]


@dataclass(frozen=True, slots=True)
class Trace:
    """All messages of a rollout. A node's parent is always before it."""

    nodes: tuple[Node, ...] = ()

    @property
    def answers(self) -> list[int]:
        """The nodes of the answers that count, in the order in which they were asked for."""
        return [index for index, node in enumerate(self.nodes) if node.sampled]

    @property
    def has_tokens(self) -> bool:
        """Whether tokens of an answer are known."""
        return any(node.sampled and len(node.token_ids) for node in self.nodes)

    @property
    def num_sampled(self) -> int:
        """Sampled tokens of all answers."""
        return sum(len(node.logprobs) for node in self.nodes)

    @property
    def longest_answer(self) -> int:
        """Sampled tokens of the longest answer, which `sampling.max_tokens` bounds."""
        return max((len(node.logprobs) for node in self.nodes), default=0)

    @property
    def versions(self) -> list[int]:
        """The policy versions that sampled its tokens, ascending."""
        return sorted({int(version) for node in self.nodes for version in node.versions})

    def path(self, index: int) -> list[int]:
        """The nodes from the first one to this."""
        return _path(index, lambda place: self.nodes[place].parent)

    def conversation(self, index: int) -> list[Any]:
        """The messages up to a node, with its own."""
        return [self.nodes[place].message for place in self.path(index)]

    def tools_of(self, index: int) -> list[Any]:
        """The functions that the request of an answer offered."""
        return next((self.nodes[place].tools for place in reversed(self.path(index)) if self.nodes[place].tools is not None), [])

    def ids(self, index: int) -> Int:
        """[L] the tokens up to a node, with its own."""
        return np.concatenate([NO_IDS, *(self.nodes[place].token_ids for place in self.path(index))])

    def sizes(self) -> list[tuple[int, int]]:
        """(prompt tokens, sampled tokens) of each answer with known tokens."""
        ends: list[int] = []
        for node in self.nodes:
            ends.append((ends[node.parent] if node.parent != START else 0) + len(node.token_ids))
        return [(ends[index] - len(self.nodes[index].logprobs), len(self.nodes[index].logprobs)) for index in self.answers if ends[index]]

    def branches(self, *, joined: bool = True) -> list[Branch]:
        """The paths that hold each answer once, in the order of their first answers.

        An answer joins the branch that ends with the last answer before it in its path. If another answer has continued that one already,
        it begins a branch, in which the earlier answers are context. `joined=False`: each answer is a branch of its own.
        """
        ends: dict[int, Branch] = {}  # by the last answer of each
        found: list[Branch] = []
        for index in self.answers:
            path = self.path(index)
            before = next((place for place in reversed(path[:-1]) if self.nodes[place].sampled), None)
            branch = ends.pop(before, None) if joined and before is not None else None
            if branch is None:
                branch = Branch([], set())
                found.append(branch)
            branch.path = path
            branch.own.add(index)
            ends[index] = branch
        return found

    def teacher_prompt(self, path: Sequence[int], end: int) -> Int | None:
        """[P'] what a teacher reads in place of the first `end` tokens of a path; None: the tokens themselves."""
        first = next((place for place in path if self.nodes[place].teacher_prompt_ids is not None), None)
        if first is None:
            return None
        node = self.nodes[first]
        prompt = len(self.ids(first)) - len(node.logprobs)
        return np.concatenate([node.teacher_prompt_ids, self.ids(path[-1])[prompt:end]])


@dataclass(slots=True)
class _Grown:
    """A node while the trace grows."""

    node: Node
    depth: int  # messages up to it, with its own
    length: int  # tokens up to it, with its own
    number: int  # of the first request that has it
    request_id: str = ""
    counts: bool = False  # an answer that is trained if its request is kept
    continues: bool = False  # an answer that a later prompt may show as it is
    offered: list[Any] | None = None  # the tools of an answer's request


class TraceBuilder:
    """A trace while its episode goes on. Requests may be answered in any order; they stand in the order of their numbers."""

    __slots__ = ("_answers", "_grown", "_without_tokens")

    def __init__(self) -> None:
        self._grown: list[_Grown] = []
        self._without_tokens: dict[int, list[int]] = {}  # the nodes of prompts by their parent
        self._answers: dict[int, int] = {}  # node by the number of the request

    def add(
        self,
        number: int,
        messages: Sequence[Any],
        tools: Sequence[Any] | None,
        answer: Any,
        turn: Turn | None,
        *,
        request_id: str = "",
        finish_reason: str = "",
        counts: bool = True,
        continues: bool = True,
    ) -> None:
        """A request was answered. `messages`: its prompt. `tools`: what it offered. `turn`: its tokens; None: they are unknown.

        `counts`: whether it is trained. `continues`: whether later prompts show the answer as it is here.
        """
        offered = list(tools or ())
        parent = self.before(messages, offered, number) if turn is None else self._continued(turn.prompt_ids, number)
        first, length, known = 0, 0, []
        if parent is not None:
            first, length, known = self._grown[parent].depth, self._grown[parent].length, self._grown[parent].offered or []
        if messages and messages[-1].get("role") == "text":  # a raw prompt is whole, whatever its tokens continue
            first = 0
        changed = offered if offered != known else None
        at = START if parent is None else parent
        for message in messages[first:]:
            at, changed = self._context(at, message, changed, length, number), None
        tokens: dict[str, Any] = {"finish_reason": finish_reason}
        if turn is not None:
            tokens = _tokens_of(turn, length)
            length += len(tokens["token_ids"])
            path = [] if at == START or turn.teacher_prompt_ids is None else self._path(at)
            if any(self._grown[place].node.teacher_prompt_ids is not None for place in path):
                tokens["teacher_prompt_ids"] = None  # it follows from that of the path
        node = Node(parent=at, message=answer, sampled=True, tools=changed, **tokens)
        depth = 1 if at == START else self._grown[at].depth + 1
        self._grown.append(_Grown(node, depth, length, number, request_id, counts, continues, offered))
        self._answers[number] = len(self._grown) - 1

    def _context(self, parent: int, message: Any, tools: list[Any] | None, length: int, number: int) -> int:
        """The node of a prompt's message. Prompts that repeat each other, as of a history that is written anew, share theirs."""
        for place in self._without_tokens.setdefault(parent, []):
            one = self._grown[place]
            if one.node.message == message and one.node.tools == tools:
                one.number = min(one.number, number)
                return place
        depth = 1 if parent == START else self._grown[parent].depth + 1
        self._grown.append(_Grown(Node(parent=parent, message=message, tools=tools), depth, length, number))
        self._without_tokens[parent].append(len(self._grown) - 1)
        return len(self._grown) - 1

    def before(self, messages: Sequence[Any], tools: Sequence[Any] | None, number: int | None = None) -> int | None:
        """The last answer whose conversation these messages continue with messages of the environment alone, with the same tools.

        `number`: of the request, if it is known; later ones are not looked at.
        """
        for index in reversed(self._answers.values()):
            one = self._grown[index]
            if not one.continues or one.depth >= len(messages) or (number is not None and one.number > number):
                continue
            own = one.offered == list(tools or ()) and all(message["role"] != "assistant" for message in messages[one.depth :])
            if own and self._said(index) == list(messages[: one.depth]):
                return index
        return None

    def tokens(self, index: int) -> tuple[Int, Int]:
        """([P], [C]) the prompt and the sampled tokens of an answer."""
        whole, sampled = self._ids(index), len(self._grown[index].node.logprobs)
        return whole[: len(whole) - sampled], whole[len(whole) - sampled :]

    def depth(self, index: int) -> int:
        """Messages up to an answer, with its own."""
        return self._grown[index].depth

    def requests(self, request_ids: Collection[str] | None = None) -> list[int]:
        """The numbers of the requests that count, in their order; with `request_ids`, of those."""
        wanted = None if request_ids is None else set(request_ids)
        which = (number for number, index in self._answers.items() if self._grown[index].counts)
        return sorted(number for number in which if wanted is None or self._grown[self._answers[number]].request_id in wanted)

    def request(self, number: int) -> tuple[list[Any], Any, list[Any], Int]:
        """(messages, answer, tools, [P] prompt) of a request."""
        index = self._answers[number]
        *messages, answer = self._said(index)
        return messages, answer, self._grown[index].offered or [], self.tokens(index)[0]

    def numbers(self) -> list[int]:
        """The numbers of the answered requests that have an id, in their order."""
        return sorted(number for number, index in self._answers.items() if self._grown[index].request_id)

    def teacher_prompt(self, prompt: Sequence[int]) -> Int | None:
        """[P'] a prompt with the demonstration of the first request whose prompt it begins with; None: there is none."""
        whole = np.asarray(prompt, np.int32)
        for number in sorted(self._answers):
            index = self._answers[number]
            node = self._grown[index].node
            if node.teacher_prompt_ids is not None:
                known, _ = self.tokens(index)
                if np.array_equal(whole[: len(known)], known):
                    return np.concatenate([node.teacher_prompt_ids, whole[len(known) :]])
        return None

    def trace(self, numbers: Sequence[int] | None = None, marks: Mapping[int, Int] | None = None) -> Trace:
        """The trace of these requests; None: of all that count. Answers of others in their prompts are context.

        `marks`: of each request [P], for `Node.observation_mask`.
        """
        kept = {self._answers[number] for number in (self.requests() if numbers is None else numbers)}
        wanted = sorted({place for index in kept for place in self._path(index)}, key=lambda place: (self._grown[place].number, place))
        places = {old: new for new, old in enumerate(wanted)} | {START: START}
        masks: dict[int, Int] = {}
        for number, of_prompt in (marks or {}).items():
            for place, part in self._parts(self._answers[number], of_prompt):
                masks[place] = masks[place] + part if place in masks else part
        nodes = []
        for old in wanted:
            node, beside = self._grown[old].node, old not in kept and self._grown[old].node.sampled
            if not beside and places[node.parent] == node.parent and old not in masks:
                nodes.append(node)
                continue
            changes: dict[str, Any] = {"parent": places[node.parent], "observation_mask": masks.get(old)}
            if beside:
                changes |= {"sampled": False, "logprobs": NO_LOGPROBS, "versions": NO_IDS, "ends": NO_IDS, "finish_reason": ""}
                if node.teacher_prompt_ids is not None:  # it stands for all tokens of the node then
                    changes["teacher_prompt_ids"] = np.concatenate(
                        [node.teacher_prompt_ids, node.token_ids[len(node.token_ids) - len(node.logprobs) :]]
                    )
            nodes.append(replace(node, **changes))
        return Trace(tuple(nodes))

    def _path(self, index: int) -> list[int]:
        return _path(index, lambda place: self._grown[place].node.parent)

    def _said(self, index: int) -> list[Any]:
        return [self._grown[place].node.message for place in self._path(index)]

    def _ids(self, index: int) -> Int:
        return np.concatenate([NO_IDS, *(self._grown[place].node.token_ids for place in self._path(index))])

    def _continued(self, prompt: Int, number: int) -> int | None:
        """The answer with the most tokens that a prompt begins with."""
        earlier = [index for before, index in self._answers.items() if before < number and 0 < self._grown[index].length <= len(prompt)]
        for index in sorted(earlier, key=lambda index: -self._grown[index].length):
            if np.array_equal(self._ids(index), prompt[: self._grown[index].length]):
                return index
        return None

    def _parts(self, index: int, of_prompt: Int) -> Iterator[tuple[int, Int]]:
        """The part of a prompt's marks that belongs to the tokens of each node of its path."""
        for place in self._path(index):
            end, size = self._grown[place].length, len(self._grown[place].node.token_ids)
            part = of_prompt[end - size : end]
            if part.any():
                yield place, np.concatenate([part, np.zeros(size - len(part), np.int32)])


def _tokens_of(turn: Turn, known: int) -> dict[str, Any]:
    """The fields of an answer's node that its tokens give. `known`: tokens of its prompt that belong to nodes before it."""
    assert len(turn.completion_ids) == len(turn.logprobs) == len(turn.versions), "a number for each sampled token"
    versions, size = turn.versions, len(turn.versions)
    if size and (versions == versions[0]).all():  # the usual case, and the cheaper test
        changes: Any = ()
    else:
        changes = np.flatnonzero(versions[1:] != versions[:-1]) + 1
    return {
        "token_ids": np.concatenate([turn.prompt_ids[known:], turn.completion_ids]).astype(np.int32, copy=False),
        "logprobs": turn.logprobs,
        "versions": versions[[0, *changes]] if size else NO_IDS,
        "ends": np.array([*changes, size], np.int32) if size else NO_IDS,
        "temperature": turn.temperature,
        "finish_reason": turn.finish_reason,
        "teacher_prompt_ids": turn.teacher_prompt_ids,
    }


def _path(index: int, parent_of: Any) -> list[int]:
    path = []
    while index != START:
        path.append(index)
        index = parent_of(index)
    return path[::-1]
