"""The doctor's report, as text and as JSON."""

from __future__ import annotations

import json

import jax
import pytest
from test_devices import fake

from kda_jax import native
from kda_jax.cli import doctor as module
from kda_jax.cli import main
from kda_jax.cli.doctor import plugin_problem
from kda_jax.native import NativeStatus


def test_doctor(capsys):
    assert main(["doctor"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and all(len(line) <= 80 for line in out.splitlines())
    assert "scan" in out and "jaxlib" in out
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    backends = {b["name"]: b for b in found["backends"]}
    assert {"auto", "fused", "chunked", "scan"} <= backends.keys()
    assert backends["scan"]["works"] and backends["chunked"]["works"] and backends["auto"]["works"]
    assert backends["scan"]["checkpoint_alignment"] == 1
    assert all(b["reason"] for b in backends.values())


@pytest.mark.parametrize(
    ("name", "version", "problem"),
    [
        ("jax-cuda13-plugin", "0.10.2", None),
        ("jax-rocm7-plugin", "0.10.2.post1", None),
        ("jax-rocm7-pjrt", "0.9.1", "jax-rocm7-pjrt==0.10.2"),
        ("jax-cuda12-pjrt", "0.10.2.1", "does not match jaxlib 0.10.2"),
        ("jaxlib-rocm", "0.4.5", "abandoned"),
        ("libtpu", "0.0.30", None),
    ],
)
def test_doctor_flags_plugins(name, version, problem):
    found = plugin_problem(name, version, jaxlib="0.10.2")
    assert found is None if problem is None else problem in found


def test_doctor_survives_what_it_reports(capsys, monkeypatch):
    """A backend that dies, one with wrong numbers, no devices: reported, exit code 0."""

    def die(name):
        raise RuntimeError("no such luck\nat all")

    monkeypatch.setattr(module, "_trial", die)
    monkeypatch.setattr(module, "_names", lambda: ["scan"])
    assert main(["doctor", "--json"]) == 0
    (scan,) = json.loads(capsys.readouterr().out)["backends"]
    assert (scan["works"], scan["reason"]) == (False, "RuntimeError: no such luck")

    monkeypatch.setattr(module, "_trial", lambda name: 0.5)
    assert main(["doctor"]) == 0
    assert "wrong numbers" in capsys.readouterr().out

    def no_devices():
        raise RuntimeError("Unable to initialize backend")

    monkeypatch.setattr(jax, "devices", no_devices)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "PROBLEM: jax finds no device" in out and "Backends" not in out


def test_doctor_reports_devices_and_libraries(capsys, monkeypatch):
    """Each library with its FFI version and list; each device, and whether the list covers it."""
    status = NativeStatus(
        available_platforms=("cpu", "rocm"),
        reasons={"cuda": "no driver"},
        libraries={"cpu": "/lib/_native.so", "cuda": "/lib/_c.so", "rocm": "/lib/_native_rocm.so"},
        ffi_versions={"cpu": (0, 1), "cuda": (0, 9), "rocm": (0, 1)},
        jaxlib_ffi_version=(0, 3),
        architectures={"rocm": "gfx942,gfx950"},
    )
    monkeypatch.setattr(native, "status", lambda: status)
    cards = [fake("rocm", "gfx942"), fake("rocm", "gfx1100", 1)]
    monkeypatch.setattr(module, "all_devices", lambda: cards)
    monkeypatch.setattr(module, "_names", lambda: [])
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    by_platform = {library["platform"]: library for library in found["native"]["libraries"]}
    assert by_platform["rocm"] == {
        "platform": "rocm",
        "path": "/lib/_native_rocm.so",
        "ffi_version": "0.1",
        "architectures": "gfx942,gfx950",
    }
    assert by_platform["cuda"]["ffi_version"] == "0.9"
    good, bad = found["devices"]
    assert (good["platform"], good["architecture"], good["problem"]) == ("rocm", "gfx942", None)
    assert "gfx942, gfx950 and does not run on a device of gfx1100" in bad["problem"]

    assert main(["doctor"]) == 0
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "a card gfx942" in out and "PROBLEM: its kernel was compiled for gfx942, gfx950" in out
    assert "native rocm FFI 0.1, for gfx942,gfx950: /lib/_native_rocm.so" in out
    assert "not used, FFI 0.9" in out and "no driver" in out
