"""The HTTP server: OpenAI's forms and what it refuses."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from http_server import EOS, Characters, make_service, serving
from prometheus_client.parser import text_string_to_metric_families
from symbolic_device import VOCAB, continuation

from kda_jax.serving.http import Service
from kda_jax.serving.http.protocol import CompletionRequest

GREEDY = {"temperature": 0, "return_token_ids": True}


@pytest.fixture(scope="module")
def service() -> Service:
    return make_service()


@pytest.fixture(scope="module")
def http(service: Service) -> Iterator[httpx.Client]:
    with serving(service) as client:
        yield client


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(4, VOCAB, length).tolist()


def complete(http: httpx.Client, **body: Any) -> Any:
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def events(http: httpx.Client, **body: Any) -> list[Any]:
    with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_completion(http: httpx.Client) -> None:
    tokens = prompt(50)
    want = continuation(tokens, 9, [EOS])
    made = complete(http, model="symbolic", prompt=tokens, max_tokens=9, **GREEDY)
    choice = made["choices"][0]
    assert choice["token_ids"] == want
    ended = want[-1] == EOS
    assert choice["finish_reason"] == ("stop" if ended else "length")
    assert choice["text"] == Characters().decode(want[:-1] if ended else want)
    assert (made["object"], made["model"]) == ("text_completion", "symbolic")
    assert made["id"].startswith("cmpl-")
    assert made["usage"] == {
        "prompt_tokens": 50,
        "completion_tokens": len(want),
        "total_tokens": 50 + len(want),
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_text_and_the_cache(http: httpx.Client) -> None:
    http.post("/reset_prefix_cache").raise_for_status()
    facts = "".join(chr(40 + i % 80) for i in range(100))
    for end, cached in (("a", 0), ("b", 96)):
        made = complete(http, prompt=facts + end, max_tokens=4, **GREEDY)
        want = continuation(Characters().encode(facts + end), 4, [EOS])
        assert made["choices"][0]["token_ids"] == want
        assert made["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
    assert http.post("/reset_prefix_cache").json()["cleared"] > 0
    made = complete(http, prompt=facts + "b", max_tokens=4)
    assert made["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert "token_ids" not in made["choices"][0]


def test_a_stream_is_the_same_in_pieces(http: httpx.Client) -> None:
    body = {"prompt": prompt(40, 1), "max_tokens": 12, "ignore_eos": True, **GREEDY}
    whole = complete(http, **body)
    chunks = events(http, **body, stream_options={"include_usage": True})
    usage = chunks.pop()
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 12
    assert all("usage" not in chunk for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(c["text"] for c in choices) == whole["choices"][0]["text"]
    tokens = [token for c in choices for token in c["token_ids"]]
    assert tokens == whole["choices"][0]["token_ids"]
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["length"]
    assert len(choices) == 12


@pytest.mark.parametrize("stream", [True, False])
def test_stop_strings_end_the_text(http: httpx.Client, stream: bool) -> None:
    tokens = prompt(40, 2)
    text = Characters().decode(continuation(tokens, 20))
    stop = text[6:9]
    want = text[: text.index(stop)]
    body = {"prompt": tokens, "max_tokens": 20, "ignore_eos": True, "temperature": 0, "stop": stop}
    if stream:
        choices = [chunk["choices"][0] for chunk in events(http, **body)]
        got, reason = "".join(c["text"] for c in choices), choices[-1]["finish_reason"]
    else:
        choice = complete(http, **body)["choices"][0]
        got, reason = choice["text"], choice["finish_reason"]
    assert (got, reason) == (want, "stop")


def test_stop_tokens(http: httpx.Client) -> None:
    tokens = prompt(40, 3)
    want = continuation(tokens, 20)
    body = {"prompt": tokens, "max_tokens": 20, "ignore_eos": True, **GREEDY}
    choice = complete(http, **body, stop_token_ids=[want[4]])["choices"][0]
    assert choice["token_ids"] == want[: want.index(want[4]) + 1]
    assert choice["finish_reason"] == "stop"


NOTHING = [
    {"n": 1, "best_of": 1, "echo": False, "suffix": "", "logit_bias": {}, "stop": [], "user": "me"},
    {"presence_penalty": 0.0, "frequency_penalty": 0, "top_p": 1, "stop_token_ids": []},
    {"repetition_penalty": 1.0, "top_k": -1, "min_p": 0.0, "min_tokens": 0},
    dict.fromkeys(("n", "best_of", "echo", "suffix", "logprobs", "logit_bias", "seed", "user")),
    dict.fromkeys(("max_tokens", "temperature", "top_p", "stop", "stream", "stream_options")),
    dict.fromkeys(("top_k", "metadata", "a_field_of_next_year")),
    {"stream_options": {"include_usage": None, "include_obfuscation": False}, "stream": True},
]


@pytest.mark.parametrize("body", NOTHING, ids=lambda body: ",".join(body))
def test_what_clients_send_and_asks_for_nothing(body: dict[str, Any]) -> None:
    got = CompletionRequest.parse(json.dumps({"prompt": ["a"], **body}).encode())
    plain = CompletionRequest.parse(b'{"prompt": "a"}')
    got = dataclasses.replace(got, params=dataclasses.replace(got.params, seed=0))
    plain = dataclasses.replace(plain, params=dataclasses.replace(plain.params, seed=0))
    assert got == dataclasses.replace(plain, stream=got.stream)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (b"{", None, "the body is no JSON"),
        (b"[]", None, r"the body is \[\], want a JSON object"),
        (b"null", None, "the body is null, want a JSON object"),
        (b"[" * 99_000, None, "the body is nested too deeply"),
        (b'{"prompt": [' + b"9" * 5000 + b"]}", None, "a number of thousands of digits"),
        (b'{"prompt": "a", "stop": "\\ud800"}', "stop", "stop is no text"),
        ({"prompt": [[[5]]]}, "prompt", r"prompt\[0\] is \[5\], want an integer"),
        ({"prompt": "a", "x" * 99: 1}, "x" * 57 + "...", r"x\.\.\. is no argument"),
        ({"prompt": "a", "user": 5}, "user", "user is 5, want a string"),
        (b'{"prompt": "\\ud800"}', "prompt", "prompt is no text"),
        ({}, "prompt", "prompt is missing"),
        ({"prompt": ""}, "prompt", "prompt is empty"),
        ({"prompt": []}, "prompt", "prompt is empty"),
        ({"prompt": 5}, "prompt", "prompt is 5, want a string or a list"),
        ({"prompt": ["a", "b"]}, "prompt", "prompt has 2 prompts, want one"),
        ({"prompt": [5, "b"]}, "prompt", r"prompt\[1\] is \"b\", want an integer"),
        ({"prompt": [5, True]}, "prompt", r"prompt\[1\] is true, want an integer"),
        ({"prompt": [5, 96]}, "prompt", r"prompt\[1\] is 96, want a token in 0..95"),
        ({"prompt": [-1]}, "prompt", r"prompt\[0\] is -1"),
        ({"prompt": [10**30]}, "prompt", r"prompt\[0\] is 1000"),
        ({"prompt": prompt(2048)}, "max_tokens", "max_tokens is 16 after a prompt of 2048 tokens"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", "max_tokens is 0"),
        ({"prompt": "a", "max_tokens": 1.5}, "max_tokens", "max_tokens is 1.5, want an integer"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens", "max_tokens is true"),
        ({"prompt": "a", "max_tokens": 10**30}, "max_tokens", "max_tokens is 1000"),
        ({"prompt": "a", "temperature": -1}, "temperature", "temperature is -1"),
        (b'{"prompt": "a", "temperature": NaN}', "temperature", "temperature is nan"),
        ({"prompt": "a", "temperature": 10**400}, "temperature", "temperature is 1000"),
        ({"prompt": "a", "temperature": 1e39}, "temperature", "1e\\+39, want .* finite in float32"),
        ({"prompt": "a", "temperature": "hot"}, "temperature", 'temperature is "hot", want a num'),
        ({"prompt": "a", "top_p": 2}, "top_p", "top_p is 2"),
        ({"prompt": "a", "stop": [""]}, "stop", "stop is"),
        ({"prompt": "a", "stop": list("abcde")}, "stop", "stop has 5 strings"),
        ({"prompt": "a", "stop_token_ids": ["x"]}, "stop_token_ids", "want a list of integers"),
        ({"prompt": "a", "stream": "yes"}, "stream", 'stream is "yes", want true or false'),
        ({"prompt": "a", "stream_options": 1}, "stream_options", "stream_options is 1"),
        ({"prompt": "a", "stream_options": {}}, "stream_options", "without stream: true"),
        (
            {"prompt": "a", "stream": True, "stream_options": {"include": True}},
            "stream_options",
            r"stream_options is \[\"include\"\], want include_usage and nothing else",
        ),
        (
            {"prompt": "a", "stop_token_ids": [5, 96]},
            "stop_token_ids",
            r"\[1\] is 96, want a token",
        ),
        ({"prompt": "a", "n": 2}, "n", "n is 2, want null or 1"),
        ({"prompt": "a", "logprobs": 5}, "logprobs", "logprobs is 5, want null"),
        ({"prompt": "a", "echo": True}, "echo", "echo is true, want null or false"),
        ({"prompt": "a", "best": 2}, "best", "best is no argument"),
        (b'{"prompt": "a", "\\ud800": 2}', r"\ud800", r"\\ud800 is no argument"),
    ],
)
def test_bad_requests(http: httpx.Client, body: Any, param: str | None, message: str) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = http.post("/v1/completions", content=content)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    with pytest.raises(ValueError, match=message):
        raise ValueError(error["message"])


def test_wrong_places(http: httpx.Client) -> None:
    for method, path, status in (
        ("GET", "/v1/completions", 405),
        ("GET", "/v1/chat/completions", 404),
        ("GET", "/reset_prefix_cache", 405),
    ):
        response = http.request(method, path)
        assert response.status_code == status
        assert path in response.json()["error"]["message"]
    response = http.post("/v1/completions", json={"model": "other", "prompt": "a"})
    assert response.status_code == 404
    assert response.json()["error"]["param"] == "model"
    # More than the socket's buffers hold: it is answered although the client still sends.
    for size in (100_001, 10_000_000):
        response = http.post("/v1/completions", content=b"x" * size)
        assert response.status_code == 413
        assert response.json()["error"]["message"].startswith("the body has more than 100000 bytes")
    response = http.post("/v1/completions", content=b"{}", headers={"content-encoding": "gzip"})
    assert response.status_code == 415
    response = http.get("/" + "x" * 999)
    assert response.json()["error"]["message"] == f"there is no /{'x' * 56}..."


def test_models_health_and_metrics(http: httpx.Client) -> None:
    entry = http.get("/v1/models").json()["data"][0]
    assert (entry["id"], entry["max_model_len"]) == ("symbolic", 2048)
    assert entry["prefix_cache"] == {
        "enabled": True,
        "block_size": 16,
        "drop_draft_block": False,
        "checkpoints": True,
    }
    assert http.get("/health").json() == {"status": "ok"}
    before = samples(http)
    complete(http, prompt=prompt(30, 8), max_tokens=3, ignore_eos=True)
    http.post("/v1/completions", json={})
    after = samples(http)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["kda_engine_finished_total"] == 1
    assert grown["kda_engine_generated_tokens_total"] == 3
    assert grown["kda_prefix_cache_misses_total"] == 1
    assert grown["kda_time_to_first_token_seconds_count"] == 1
    assert grown["kda_time_per_output_token_seconds_count"] == 2
    assert grown["kda_request_seconds_count"] == 1
    assert grown["kda_http_responses_total/v1/completions400"] == 1
    assert after["kda_engine_running"] == 0


def samples(http: httpx.Client) -> dict[str, float]:
    """All samples, and a check that the text is in Prometheus' form."""
    response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        sample.name + "".join(sample.labels.values()): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def test_a_model_without_a_tokenizer_takes_tokens() -> None:
    with serving(make_service(tokenizer=None)) as http:
        tokens = prompt(20)
        choice = complete(http, prompt=tokens, max_tokens=4, temperature=0)["choices"][0]
        assert choice["token_ids"] == continuation(tokens, 4, [EOS])
        assert choice["text"] == ""
        response = http.post("/v1/completions", json={"prompt": "text"})
        assert response.status_code == 400
        assert "has no tokenizer" in response.json()["error"]["message"]
        response = http.post("/v1/completions", json={"prompt": tokens, "stop": "x"})
        assert response.json()["error"]["param"] == "stop"
