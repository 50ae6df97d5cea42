"""`prefix-check`: a client that asks a server the same with a cold cache and with a warm one."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Any

import httpx

from ..serving.rule import CheckpointRule
from . import screen
from .errors import CliError
from .prefix_prompts import Questions, questions
from .prefix_server import LENGTHS, lengths_for, rule_of

_STEPS = re.compile(r"^kda_engine_prefill_steps_total (\d+)$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a server answered. tokens, cached, steps: None where it does not say."""

    text: str
    tokens: list[int] | None
    prompt_tokens: int
    cached: int | None
    steps: int | None

    def same_as(self, other: Answer) -> bool:
        """Token for token, or by the text where there are no tokens."""
        if self.tokens is None or other.tokens is None:
            return self.text == other.text
        return self.tokens == other.tokens


class Client:
    """An OpenAI-compatible server."""

    def __init__(self, url: str, model: str | None, timeout: float) -> None:
        # OpenAI's clients are given the address with its version.
        base = url.rstrip("/").removesuffix("/v1")
        self._http = httpx.Client(base_url=base, timeout=timeout)
        listed = self._json("GET", "/v1/models")
        entries = listed.get("data") if isinstance(listed, dict) else None
        if not isinstance(entries, list) or not all(isinstance(each, dict) for each in entries):
            raise CliError(
                "/v1/models did not answer with a list of models, as OpenAI's API has it"
            )
        if model is not None:
            entries = [entry for entry in entries if entry.get("id") == model]
            if not entries:
                raise CliError(f"--model {model}: the server has no such model")
        if not entries or not isinstance(entries[0].get("id"), str):
            raise CliError("/v1/models names no model")
        self.model: str = entries[0]["id"]
        says, longest = entries[0].get("prefix_cache"), entries[0].get("max_model_len")
        self.says: dict[str, Any] = says if isinstance(says, dict) else {}
        self.longest: int | None = longest if isinstance(longest, int) else None

    def reset(self) -> None:
        """Forgets all prefixes."""
        self._request("POST", "/reset_prefix_cache")

    def ask(self, prompt: str, max_tokens: int) -> Answer:
        """The greedy continuation of a prompt, to the end of the line at most."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stop": ["\n"],
        }
        if self.says:  # one of ours, or one that knows the argument
            body["return_token_ids"] = True
        before = self._steps()
        made = self._json("POST", "/v1/completions", json=body)
        after = self._steps()
        try:
            choice, usage = made["choices"][0], made["usage"]
            details = usage.get("prompt_tokens_details") or {}
            return Answer(
                text=choice["text"],
                tokens=choice.get("token_ids"),
                prompt_tokens=usage["prompt_tokens"],
                cached=details.get("cached_tokens"),
                steps=None if before is None or after is None else after - before,
            )
        except (KeyError, IndexError, TypeError, AttributeError):
            shown = " ".join(json.dumps(made).split())[:200]
            raise CliError(
                f"/v1/completions answered without a choice or usage, as OpenAI's has them: {shown}"
            ) from None

    def _steps(self) -> int | None:
        response = self._http.get("/metrics")
        found = _STEPS.search(response.text) if response.status_code == 200 else None
        return int(found[1]) if found else None

    def _json(self, method: str, path: str, **options: Any) -> Any:
        try:
            return self._request(method, path, **options).json()
        except ValueError:
            raise CliError(f"{path} did not answer with JSON") from None

    def _request(self, method: str, path: str, **options: Any) -> httpx.Response:
        response = self._http.request(method, path, **options)
        if response.status_code >= 300:
            text = " ".join(response.text.split())[:200]
            raise CliError(f"{method} {path} answered {response.status_code}: {text}")
        return response


def prefix_check(args: argparse.Namespace) -> int:
    """Run the command; 1 if a check failed."""
    out = screen.console()
    try:
        client = Client(args.url, args.model, args.timeout)
        if client.says.get("enabled") is False:
            raise CliError("the server says that its prefix cache is off (--cache-bytes)")
        rule = rule_of(client.says, args.block_size, args.drop_draft_block)
        blocks = "unknown" if rule is None else f"{rule.block_size} tokens"
        if rule is not None and rule.drop_draft_block:
            blocks += ", one dropped for drafts"
        out.print(f"{client.model} at {args.url}; cache blocks: {blocks}")
        shown = screen.table("", "tokens", "A cold", "B warm", "B cold", "cached", "want", "steps")
        problems: list[str] = []
        lengths = _lengths(client, rule, args)
        with screen.progress() as bar:
            task = bar.add_task("prompts", total=len(lengths))
            for length in lengths:
                row, wrong = check_length(client, rule, length, args)
                shown.add_row(*row)
                problems += wrong
                bar.advance(task)
    except httpx.HTTPError as error:
        raise CliError(f"{args.url}: {type(error).__name__}: {error}") from None
    out.print(shown)
    for problem in problems:
        out.print(f"WRONG: {problem}")
    if any(" answered " in problem for problem in problems) and args.format == "recall":
        out.print(
            "Only a model like that in tests/data/recall can answer: --format prose for an"
            " instructed model, --no-answers for any other"
        )
    if problems:
        return 1
    about = "equals B cold token for token" if args.answers else "equals B cold (answers unchecked)"
    out.print(f"B warm {about}; cached tokens are as predicted")
    return 0


def _lengths(
    client: Client, rule: CheckpointRule | None, args: argparse.Namespace
) -> Sequence[int]:
    """Characters of the prompts, such that their tokens cross several blocks."""
    if args.lengths or rule is None:
        return args.lengths or LENGTHS
    tokens = lengths_for(rule, client.longest)
    # What a character is in tokens, only the server's tokenizer knows; at most one, surely.
    probe = questions(args.format, tokens[-1], args.seed).prompt(0)
    share = client.ask(probe, 1).prompt_tokens / len(probe)
    return [int(count / share) for count in tokens]


def check_length(
    client: Client, rule: CheckpointRule | None, length: int, args: argparse.Namespace
) -> tuple[list[str], list[str]]:
    """One length: the row of the table, and what is wrong, in words."""
    asked, a, want = _cold(client, rule, length, args)
    b = client.ask(asked.prompt(1), asked.max_tokens)
    client.reset()
    again = client.ask(asked.prompt(1), asked.max_tokens)

    name = f"{b.prompt_tokens} tokens"
    wrong, marks = [], []
    for who, answer, right in (
        ("A cold", a, asked.answers[0]),
        ("B warm", b, asked.answers[1]),
        ("B cold", again, asked.answers[1]),
    ):
        good = answer.text.strip().startswith(right)
        marks.append(("right" if good else "WRONG") if args.answers else "-")
        if args.answers and not good:
            wrong.append(f"{name}: {who} answered {answer.text!r}, want {right!r}")
    if not b.same_as(again):
        wrong.append(
            f"{name}: B warm is {b.tokens or b.text!r}, cold {again.tokens or again.text!r}"
        )
    for who, answer in (("A", a), ("B", again)):
        if answer.cached:
            wrong.append(f"{name}: {who} read {answer.cached} tokens from a cache that was reset")
    if b.cached is None:
        wrong.append(
            f"{name}: usage.prompt_tokens_details.cached_tokens is missing (vLLM and its kin need"
            " --enable-prompt-tokens-details)"
        )
    elif want is None and not b.cached:
        wrong.append(
            f"{name}: B read nothing from A's cache (are the server's blocks longer than that?"
            " --lengths or --block-size)"
        )
    elif want is not None and b.cached != want:
        wrong.append(f"{name}: B read {b.cached} tokens from A's cache, want {want}")
    steps = [answer.steps for answer in (a, b, again)]
    row = [
        str(b.prompt_tokens),
        *marks,
        "?" if b.cached is None else str(b.cached),
        "more than 0" if want is None else str(want),
        "?" if None in steps else ", ".join(map(str, steps)),
    ]
    return row, wrong


def _cold(
    client: Client, rule: CheckpointRule | None, length: int, args: argparse.Namespace
) -> tuple[Questions, Answer, int | None]:
    """Asks A on an empty cache; with it the prompts, and how much of B must be read from A's cache.

    Where A's last whole block reaches into its question, B cannot share it: a shorter list then.
    """
    for shorter in range(0, length // 2, 10):
        asked = questions(args.format, length - shorter, args.seed)
        client.reset()
        answer = client.ask(asked.prompt(0), asked.max_tokens)
        if rule is None:
            return asked, answer, None
        want = rule.last_position(answer.prompt_tokens)
        if not want:
            break
        if want <= answer.prompt_tokens - asked.unshared:
            return asked, answer, want
    if rule and rule.block_size <= asked.unshared:
        raise CliError(
            f"--format {args.format}: its questions end in {asked.unshared} characters, too many"
            f" for blocks of {rule.block_size}: the last one always reaches into a question;"
            " --format recall has shorter ones"
        )
    raise CliError(
        f"--lengths {length}: {answer.prompt_tokens} tokens are too short for blocks of"
        f" {rule.block_size if rule else 0}, of which nothing could come from the cache"
    )
