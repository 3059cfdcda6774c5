"""What a server reads of its run: everything before the first request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from file_reads import opened_below
from retrofits import retrofitted_copy
from topograd.runs.session import LoadedTextRun
from topograd.serve.server import open_served
from topograd.serve.settings import Limits


def test_requests_read_no_file_of_the_run(
    make_session: Callable[..., LoadedTextRun], serve: Callable[..., Any], tmp_path: Path
) -> None:
    folder = retrofitted_copy(make_session(3).run.folder, tmp_path / "run")
    running, stop = serve(open_served(folder, None, Limits()))
    try:
        with (
            httpx.Client(base_url=running.address(), timeout=60, trust_env=False) as client,
            opened_below(folder) as read,
        ):
            listed = [model["id"] for model in client.get("/v1/models").json()["data"]]
            assert "run:wand" in listed, "it is calibrated"
            assert client.get("/v1/models/run:speculate").status_code == 200
            for depth in ("speculate", "speculate", "wand", "prefix:1"):
                body = {"prompt": "sta", "temperature": 0, "max_tokens": 4, "depth": depth}
                answer = client.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
    finally:
        stop()
    assert read == []
