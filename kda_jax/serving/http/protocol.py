"""The body of a completion request, checked field by field, and errors in OpenAI's form."""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
from typing import Any

from ..request import SamplingParams

# Fields that clients send although there is nothing to choose here, and the values that say so. The
# last ones are those of vLLM's clients.
_FIXED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (),
    "suffix": ("",),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "min_tokens": (0,),
}
_TAKEN = (
    "model",
    "prompt",
    "max_tokens",
    "temperature",
    "top_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "stream",
    "stream_options",
    "return_token_ids",
    "user",
)
_MOST_STOPS = 4


class RequestError(Exception):
    """What is wrong with a request.

    Attributes:
      status: the HTTP status.
      param: the argument that is wrong, or None.
      kind: the error's type in OpenAI's form.
      headers: of the response.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        kind: str = "invalid_request_error",
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.kind, self.headers = status, param, kind, headers

    def body(self) -> dict[str, Any]:
        """As OpenAI's API has it."""
        param = None if self.param is None else _encodable(self.param)
        error = {"type": self.kind, "param": param, "code": self.status}
        return {"error": {"message": _encodable(str(self))} | error}


@dataclasses.dataclass(frozen=True)
class CompletionRequest:
    """A checked body.

    prompt: text or token numbers. stop: strings that end the text. return_token_ids: whether
    choices hold the tokens, too.
    """

    model: str | None
    prompt: str | list[int]
    params: SamplingParams
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    return_token_ids: bool

    @classmethod
    def parse(cls, raw: bytes) -> CompletionRequest:
        """Reads a body.

        Raises:
          RequestError: naming the argument, its value and what is allowed.
        """
        body = _json(raw)
        for name, value in body.items():
            if name in _FIXED:
                if value is not None and not any(_same(value, one) for one in _FIXED[name]):
                    allowed = " or ".join(["null", *map(json.dumps, _FIXED[name])])
                    raise _wrong(name, value, f"{allowed}: nothing else is supported")
            elif name not in _TAKEN and value is not None:
                shown = name if len(name) <= 60 else name[:57] + "..."
                raise RequestError(f"{shown} is no argument of /v1/completions", param=shown)
        _of(body, "user", str, None, "a string")  # of no use here, but a mistake is one
        stream = _of(body, "stream", bool, False, "true or false")
        return cls(
            model=_of(body, "model", str, None, "a string"),
            prompt=_prompt(body.get("prompt")),
            params=_params(body),
            stop=_stops(body.get("stop")),
            stream=stream,
            include_usage=_include_usage(body, stream),
            return_token_ids=_of(body, "return_token_ids", bool, False, "true or false"),
        )


def _encodable(text: str) -> str:
    """JSON can name half of a character (\\ud800), and then no response could quote the client."""
    return text.encode(errors="backslashreplace").decode()


def as_request_error(error: ValueError) -> RequestError:
    """The library's messages begin with the argument's name."""
    name = re.match(r"[a-z_]+", str(error))
    return RequestError(str(error), param=name[0] if name and name[0] in _TAKEN else None)


def _json(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw)
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is no JSON: {error}") from None
    except ValueError:  # Python reads no integers of more than 4300 digits
        raise RequestError("the body has a number of thousands of digits") from None
    if not isinstance(body, dict):
        raise RequestError(f"the body is {_shown(body)}, want a JSON object")
    return body


def _include_usage(body: dict[str, Any], stream: bool) -> bool:
    options = _of(body, "stream_options", dict, None, "an object")
    if options is None:
        return False
    if not stream:
        raise RequestError("stream_options is given without stream: true", param="stream_options")
    asked = {name for name, value in options.items() if value is not None and value is not False}
    if others := asked - {"include_usage"}:
        raise _wrong("stream_options", sorted(others), "include_usage and nothing else")
    return _of(options, "include_usage", bool, False, "true or false")


def _prompt(value: Any) -> str | list[int]:
    if value is None:
        raise RequestError("prompt is missing: give a string or a list of tokens", param="prompt")
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        if not value:
            raise RequestError("prompt is empty: give it at least one character", param="prompt")
        _check_text("prompt", value)
        return value
    if isinstance(value, list):
        if len(value) > 1 and all(isinstance(part, str | list) for part in value):
            raise RequestError(
                f"prompt has {len(value)} prompts, want one: send a request for each",
                param="prompt",
            )
        for i, token in enumerate(value):
            # An integer in JSON may be as large as it likes.
            if type(token) is not int or abs(token) > 2**62:
                raise _wrong(f"prompt[{i}]", token, "an integer", param="prompt")
        return value
    raise _wrong("prompt", value, "a string or a list of tokens")


def _params(body: dict[str, Any]) -> SamplingParams:
    numbers: dict[str, Any] = {}
    for name, kinds, default, want in (
        ("max_tokens", int, 16, "an integer"),
        ("temperature", (int, float), 1.0, "a number"),
        ("top_p", (int, float), 1.0, "a number"),
        ("seed", int, None, "an integer"),
        ("stop_token_ids", list, [], "a list of integers"),
        ("ignore_eos", bool, False, "true or false"),
    ):
        numbers[name] = _of(body, name, kinds, default, want)
    if numbers["seed"] is None:
        numbers["seed"] = secrets.randbits(32)
    numbers["seed"] %= 2**32  # clients send negative ones and ones of 64 bits
    stops = numbers["stop_token_ids"]
    if not all(type(token) is int and abs(token) < 2**62 for token in stops):
        raise _wrong("stop_token_ids", stops, "a list of integers")
    try:
        return SamplingParams(**numbers | {"stop_token_ids": tuple(stops)})
    except ValueError as error:
        raise as_request_error(error) from None


def _stops(value: Any) -> tuple[str, ...]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise _wrong("stop", value, "a string or a list of strings, none of them empty")
    if len(stops) > _MOST_STOPS:
        raise RequestError(f"stop has {len(stops)} strings, want at most 4", param="stop")
    for stop in stops:
        _check_text("stop", stop)
    return tuple(stops)


def _check_text(name: str, text: str) -> None:
    """Refuses half of a character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{name} is no text: {error}", param=name) from None


def _of(body: dict[str, Any], name: str, kinds: Any, default: Any, want: str) -> Any:
    """A field of that type; null is the default."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
        raise _wrong(name, value, want)
    return value


def _same(value: Any, allowed: Any) -> bool:
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)


def _wrong(name: str, value: Any, want: str, param: str | None = None) -> RequestError:
    return RequestError(f"{name} is {_shown(value)}, want {want}", param=param or name)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
