"""xgr doctor: what it checks, and what makes it fail."""

from __future__ import annotations

import os
import tempfile

import pytest
import torch
from cli_support import RunCli

from xgr_engine import system


def _states(outcome) -> dict[str, str]:  # type: ignore[no-untyped-def]
    return {check["name"]: check["state"] for check in outcome.json["checks"]}


def test_this_machine_is_fit(cli: RunCli) -> None:
    outcome = cli("doctor", "--json")
    states = _states(outcome)
    assert outcome.code == 0 and outcome.json["ok"] is True
    assert set(states) >= {"python", "packages", "torch", "gpu", "triton", "memory", "cpu", "working directory"}
    assert outcome.json["machine"]["versions"]["torch"] == torch.__version__
    assert "torch" in cli("doctor").out


def test_missing_package_fails_and_is_named(cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = [system.Package("jinja2", ">=99", "3.1", fits=False), system.Package("rich", ">=1", "15", fits=True)]
    monkeypatch.setattr(system, "packages", lambda: broken)
    outcome = cli("doctor", "--json")
    assert outcome.code == 1 and outcome.json["ok"] is False
    assert _states(outcome)["package jinja2"] == "fail"


def test_extra_that_is_not_installed_is_no_fault(cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        system,
        "packages",
        lambda: [
            system.Package("absent", ">=1", None, fits=False, extra="hf"),
            system.Package("old", ">=2", "1", fits=False, extra="dev"),
        ],
    )
    outcome = cli("doctor", "--json")
    assert outcome.code == 0
    assert _states(outcome)["package old"] == "warn" and "package absent" not in _states(outcome)


def test_running_from_source_is_said(cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "packages", list)
    outcome = cli("doctor", "--json")
    assert outcome.code == 0 and _states(outcome)["packages"] == "warn"


def test_torch_that_computes_nonsense_fails(cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "ones", torch.zeros)
    outcome = cli("doctor", "--json")
    assert outcome.code == 1 and _states(outcome)["torch"] == "fail"


def test_working_directory_that_cannot_be_written_fails(cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(dir: object) -> None:
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    outcome = cli("doctor", "--json")
    assert outcome.code == 1
    assert _states(outcome)["working directory"] == "fail" and _states(outcome)["kernel cache"] == "warn"


def test_little_memory_is_a_warning(cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "memory", lambda: system.Memory(1 << 31, 1 << 20, limited_by_cgroup=True))
    outcome = cli("doctor", "--json")
    assert outcome.code == 0 and _states(outcome)["memory"] == "warn"
    assert "container" in cli("doctor").out
