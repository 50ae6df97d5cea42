"""The prefix check finds what is wrong with a server, and nothing where nothing is."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_server import CONFIG, WrongWhenWarm, make_service, serving
from server_process import process

from kda_jax.cli import main
from kda_jax.cli.prefix_prompts import questions
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


def test_another_block_size_than_the_server_has(capsys: pytest.CaptureFixture) -> None:
    with serving(make_service()) as http:
        code, text = check(http, capsys, "--no-answers", "--lengths", "300", "--block-size", "128")
    assert code == 1
    assert "want 256" in text


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
        usage: dict[str, Any] = {"prompt_tokens": 240, "completion_tokens": 3}
        if self.cached is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached if warm else 0}
        return httpx.Response(200, json={"choices": [{"text": f" {code}."}], "usage": usage})


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
    client = httpx.Client
    monkeypatch.setattr(
        httpx, "Client", lambda **kw: client(**kw, transport=httpx.MockTransport(foreign))
    )
    arguments = ["http://elsewhere", "--format", "prose", "--lengths", "900", *options]
    assert main(["prefix-check", *arguments]) == code
    captured = capsys.readouterr()
    assert message in captured.out
    assert all("return_token_ids" not in body for body in foreign.bodies)


@pytest.mark.parametrize("kind", ["recall", "prose"])
@pytest.mark.parametrize("size", [300, 1900])
def test_prompts(kind: str, size: int) -> None:
    asked = questions(kind, size, 0)
    one, other = asked.prompt(0), asked.prompt(1)
    assert size - 200 < len(one) <= size
    shared = next(i for i in range(len(one)) if one[i] != other[i])
    assert shared >= len(asked.shared)
    assert asked.answers[0] and asked.unshared < 60
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
