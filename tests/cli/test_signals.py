"""A signal while the main thread is inside a library."""

from __future__ import annotations

import signal

import pytest

from xgr_cli.output import Output
from xgr_cli.signals import stop_on_signals
from xgr_engine.job.stop import Stopped


def test_a_stop_that_a_library_turns_into_its_own_error_is_still_a_stop() -> None:
    """safetensors calls back into Python for every tensor, and raises a ValueError for whatever comes out of there."""
    with pytest.raises(Stopped) as caught, stop_on_signals(Output(), 5.0):
        try:
            signal.raise_signal(signal.SIGTERM)
        except Stopped:
            raise ValueError("could not determine the shape") from None
    assert (caught.value.reason, caught.value.exit_code) == ("SIGTERM", 143)


def test_an_error_after_a_stop_that_interrupted_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="own"), stop_on_signals(Output(), 5.0) as stop:
        stop.prompt = False
        signal.raise_signal(signal.SIGTERM)
        raise ValueError("the job's own")
