"""The prefix check finds what is wrong with a server, and nothing where nothing is."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
import readme_shell
from http_server import CONFIG, WrongWhenWarm, make_service, serving
from server_process import process

from kda_jax.cli import main
from kda_jax.cli.errors import CliError
from kda_jax.cli.prefix_check import Answer, _cold, _lengths
from kda_jax.cli.prefix_prompts import MOST_NEW_TOKENS, MOST_UNSHARED, questions
from kda_jax.cli.prefix_server import lengths_for
from kda_jax.serving import CheckpointRule


def check(http: httpx.Client, capsys: pytest.CaptureFixture, *options: str) -> tuple[int, str]:
    code = main(["prefix-check", str(http.base_url), *options])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_good_server(capsys: pytest.CaptureFixture, drop: bool, checkpoints: bool) -> None:
    config = dataclasses.replace(
        CONFIG, drop_draft_block=drop, checkpoints=checkpoints, block_size=128, checkpoint_blocks=1
    )
    with serving(make_service(config)) as http:
        code, text = check(http, capsys, "--no-answers", "--lengths", "300", "700", "1900")
        assert code == 0, text
        assert max(map(len, text.splitlines())) <= 80
        rule = CheckpointRule(128, drop_draft_block=drop)
        found = [line.split("│") for line in text.splitlines() if line.startswith("│")]
        for row in found:
            tokens, cached, want = (int(row[i]) for i in (1, 5, 6))
            assert cached == want == rule.last_position(tokens)
        assert len(found) == 3
        # A model that was not trained does not know the answers.
        code, text = check(http, capsys, "--lengths", "300")
        assert code == 1
        assert "A cold answered" in text and "B warm answered" in text


def test_more_steps_without_checkpoints(capsys: pytest.CaptureFixture) -> None:
    steps = {}
    for checkpoints in (True, False):
        config = dataclasses.replace(CONFIG, checkpoints=checkpoints, checkpoint_blocks=1)
        with serving(make_service(config)) as http:
            code, text = check(http, capsys, "--no-answers", "--lengths", "300")
            assert code == 0
            row = next(line for line in text.splitlines() if line.startswith("│"))
            steps[checkpoints] = row.split("│")[7].strip()
    assert steps == {True: "1, 1, 1", False: "2, 1, 2"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--block-size", "128"],
            "--block-size 128: the server says that its blocks have 16 tokens",
        ),
        (["--drop-draft-block"], "--drop-draft-block: the server says that it drops none"),
    ],
)
def test_another_rule_than_the_server_has(
    capsys: pytest.CaptureFixture, options: list[str], message: str
) -> None:
    with serving(make_service()) as http:
        code, text = check(http, capsys, "--no-answers", *options)
        assert code == 2
        assert message in text
        assert check(http, capsys, "--no-answers", "--lengths", "300", "--block-size", "16")[0] == 0


def test_prompts_that_no_block_holds(capsys: pytest.CaptureFixture) -> None:
    """They would read nothing, as predicted, and check nothing."""
    config = dataclasses.replace(CONFIG, block_size=512)
    with serving(make_service(config)) as http:
        code, text = check(http, capsys, "--no-answers", "--lengths", "300")
    assert code == 2
    assert "297 tokens are too short for blocks of 512" in text


@pytest.mark.parametrize(
    ("block", "longest"),
    [(16, None), (128, 2048), (256, 8192), (1536, 8192), (1536, None), (1024, 2048), (16, 200)],
)
@pytest.mark.parametrize("drop", [False, True])
def test_default_lengths_cross_blocks(block: int, longest: int | None, drop: bool) -> None:
    rule = CheckpointRule(block, drop_draft_block=drop)
    if drop and block == 1024:
        with pytest.raises(CliError, match="takes 2048 tokens at most, too few"):
            lengths_for(rule, longest)
        return
    lengths = lengths_for(rule, longest)
    assert len(set(lengths)) == 4 and list(lengths) == sorted(lengths)
    assert lengths[0] > block * (1 + drop) + MOST_UNSHARED
    if longest is None:
        assert lengths[0] > (2 + drop) * block and lengths[-1] > 5 * block
    else:
        assert lengths[-1] + MOST_NEW_TOKENS <= longest


def test_a_server_that_takes_no_whole_block() -> None:
    with pytest.raises(CliError, match="takes 512 tokens at most, too few to read a block of 1536"):
        lengths_for(CheckpointRule(1536), 512)


class Digits:
    """A server whose tokens are words and single digits: longer lists have more for a character."""

    longest = 8192

    def ask(self, prompt: str, most: int) -> Answer:
        tokens = len(re.findall(r"\d| ?[A-Za-z]+|\s+|[^\w\s]+", prompt))
        assert tokens + most <= self.longest
        return Answer(text="", tokens=None, prompt_tokens=tokens, cached=0, steps=None)

    def reset(self) -> None:
        pass


@pytest.mark.parametrize("drop", [False, True])
def test_default_prompts_fit_what_the_server_takes(drop: bool) -> None:
    client: Any = Digits()
    args = argparse.Namespace(lengths=None, format="prose", seed=0)
    rule = CheckpointRule(1536, drop_draft_block=drop)
    for length in _lengths(client, rule, args):
        assert _cold(client, rule, length, args)[2]


def test_blocks_that_are_shorter_than_a_question() -> None:
    client: Any = Digits()
    args = argparse.Namespace(format="prose", seed=0)
    with pytest.raises(CliError, match=r"too many for blocks of 16: .* --format recall"):
        _cold(client, CheckpointRule(16), 300, args)


def test_a_server_whose_warm_answers_differ(capsys: pytest.CaptureFixture) -> None:
    with serving(make_service(device=WrongWhenWarm)) as http:
        code, text = check(http, capsys, "--no-answers", "--lengths", "300")
    assert code == 1
    assert "B warm is" in text


def test_a_server_without_a_cache(capsys: pytest.CaptureFixture) -> None:
    with serving(make_service(dataclasses.replace(CONFIG, cache_bytes=0))) as http:
        code, text = check(http, capsys, "--no-answers")
        assert code == 2
        assert "prefix cache is off" in text
        code, text = check(http, capsys, "--model", "other")
        assert code == 2
        assert "--model other: the server has no such model" in text
    code, text = check(http, capsys)
    assert code == 2
    assert "ConnectError" in text


def use(monkeypatch: pytest.MonkeyPatch, server: Any) -> None:
    """Lets the command talk to a function instead of to the network."""
    client = httpx.Client
    monkeypatch.setattr(
        httpx, "Client", lambda **kw: client(**kw, transport=httpx.MockTransport(server))
    )


class Foreign:
    """A server of another kind: it knows the endpoints and says nothing of blocks."""

    def __init__(self, cached: Any) -> None:
        self.cached, self.seen, self.bodies = cached, set(), []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "other", "object": "model"}]})
        if path == "/metrics":
            return httpx.Response(404)
        if path == "/reset_prefix_cache":
            self.seen.clear()
            return httpx.Response(200)
        body = json.loads(request.content)
        self.bodies.append(body)
        prompt = body["prompt"]
        warm = prompt[:100] in self.seen
        self.seen.add(prompt[:100])
        key = prompt.rpartition("code of ")[2].partition("?")[0]
        code = prompt.partition(f"The code of {key} is ")[2][:4]
        usage = self.usage(prompt, warm)
        return httpx.Response(200, json={"choices": [{"text": f" {code}."}], "usage": usage})

    def usage(self, prompt: str, warm: bool) -> dict[str, Any]:
        usage: dict[str, Any] = {"prompt_tokens": 240, "completion_tokens": 3}
        if self.cached is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached if warm else 0}
        return usage


@pytest.mark.parametrize(
    ("cached", "options", "code", "message"),
    [
        (64, [], 0, "cached tokens are as predicted"),
        (0, [], 1, "B read nothing from A's cache"),
        (None, [], 1, "cached_tokens is missing"),
        (64, ["--block-size", "64"], 1, "want 192"),
        (192, ["--block-size", "64"], 0, "as predicted"),
        (128, ["--block-size", "64", "--drop-draft-block"], 0, "as predicted"),
    ],
)
def test_another_kind_of_server(
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    cached: int | None,
    options: list[str],
    code: int,
    message: str,
) -> None:
    foreign = Foreign(cached)
    use(monkeypatch, foreign)
    arguments = ["http://elsewhere", "--format", "prose", "--lengths", "900", *options]
    assert main(["prefix-check", *arguments]) == code
    captured = capsys.readouterr()
    assert message in captured.out
    assert all("return_token_ids" not in body for body in foreign.bodies)


class LargeTokens(Foreign):
    """Four characters are a token, and a block has 512."""

    def usage(self, prompt: str, warm: bool) -> dict[str, Any]:
        tokens = len(prompt) // 4
        cached = CheckpointRule(512).last_position(tokens) if warm else 0
        return {"prompt_tokens": tokens, "prompt_tokens_details": {"cached_tokens": cached}}


def test_lengths_are_of_tokens_not_of_characters(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, LargeTokens(None))
    assert (
        main(["prefix-check", "http://elsewhere", "--format", "prose", "--block-size", "512"]) == 0
    )
    rows = [x.split("│") for x in capsys.readouterr().out.splitlines() if x.startswith("│")]
    assert [int(row[6]) // 512 for row in rows] == [2, 3, 4, 5]


@pytest.mark.parametrize(
    ("path", "answer", "message"),
    [
        ("/v1/models", [], "did not answer with a list of models"),
        ("/v1/models", {"data": {}}, "did not answer with a list of models"),
        ("/v1/models", {"data": []}, "names no model"),
        ("/v1/models", {"data": [{"id": 5}]}, "names no model"),
        ("/v1/completions", {"choices": []}, "without a choice or usage"),
        ("/v1/completions", {"choices": [{"text": "a"}], "usage": None}, "without a choice or usa"),
        ("/v1/completions", [], "without a choice or usage"),
    ],
)
def test_a_server_that_answers_something_else(
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    answer: Any,
    message: str,
) -> None:
    def other(request: httpx.Request) -> httpx.Response:
        wrong = request.url.path == path
        return httpx.Response(200, json=answer) if wrong else Foreign(64)(request)

    use(monkeypatch, other)
    assert main(["prefix-check", "http://elsewhere"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["recall", "prose"])
@pytest.mark.parametrize("size", [300, 1900])
def test_prompts(kind: str, size: int) -> None:
    asked = questions(kind, size, 0)
    one, other = asked.prompt(0), asked.prompt(1)
    assert size - 200 < len(one) <= size
    shared = next(i for i in range(len(one)) if one[i] != other[i])
    assert shared >= len(asked.shared)
    assert asked.answers[0] and asked.unshared <= MOST_UNSHARED
    assert asked.max_tokens <= MOST_NEW_TOKENS
    assert questions(kind, size, 0) == asked != questions(kind, size, 1)


RECALL = Path(__file__).parent / "data" / "recall"
SERVE = ("--port", "0", "--block-size", "128", "--budget", "512", "--warm-up", "0")


def test_the_recall_model_through_the_command_line(
    capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    """`serve` and `prefix-check`, with and without checkpoints: all answers are right."""
    steps = []
    for state in ("--checkpoints", "--no-checkpoints"):
        cache = ("--compilation-cache", str(tmp_path))
        command = ("-m", "kda_jax", "serve", str(RECALL), *SERVE, *cache, state)
        with process(*command) as (server, url):
            if state == "--checkpoints" and shutil.which("curl"):
                readme_shell.check(url)
            # OpenAI's clients name the version, too.
            code = main(["prefix-check", url if state == "--checkpoints" else f"{url}/v1"])
            text = capsys.readouterr().out
            assert code == 0, text
            found = [line.split("│") for line in text.splitlines() if line.startswith("│")]
            assert [int(row[1]) > 256 for row in found] == [True] * 4
            steps.append([sum(map(int, row[7].split(","))) for row in found])
            server.terminate()
            assert server.wait(120) == 0
    assert all(more > fewer for fewer, more in zip(*steps, strict=True)), steps
