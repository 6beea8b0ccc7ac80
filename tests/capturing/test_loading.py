"""Everything that can keep a model from loading is one line that says what to do."""

from __future__ import annotations

import http.server
import importlib.metadata
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from sdpa_repro.capturing import loading, placement
from sdpa_repro.capturing.prefill import PrefillOptions, prepare
from sdpa_repro.errors import InputError
from tests import models


def refusal(**words: Any) -> str:
    """The one line with which `prepare` refuses these options."""
    with pytest.raises(InputError) as caught:
        prepare(PrefillOptions(device="cpu", **words) if "device" not in words else PrefillOptions(**words))
    line = str(caught.value)
    assert "\n" not in line
    return line


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save_llama(tmp_path_factory.mktemp("llama") / "llama")


def config_only(folder: Path, text: str) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(text)
    return str(folder)


def test_paths_that_are_not_model_folders(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    assert refusal(model=str(tmp_path / "gone")).startswith("there is no folder ")
    assert refusal(model="./gone") == "there is no folder ./gone"
    assert "is a file" in refusal(model=str(tmp_path / "file"))
    assert "has no config.json" in refusal(model=str(tmp_path / "empty"))


def test_a_name_that_is_no_hub_id() -> None:
    assert "neither a folder nor a model id" in refusal(model="not a model!")


def test_a_model_that_is_not_cached_while_the_hub_is_out_of_reach() -> None:
    assert "is not in the local cache and the hub cannot be reached" in refusal(model="google/gemma-4-12B-it")


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ("{broken", "a JSON file of m is broken"),
        ('{"model_type": "zork"}', "does not know the architecture of m: pip install --upgrade transformers"),
        ('{"hidden_size": 3}', "is missing or has no model_type"),
        ('{"model_type": "llama", "hidden_size": "big"}', "the configuration of m is not valid"),
        ('{"model_type": "bloom"}', "does not run through scaled_dot_product_attention"),
        ('{"model_type": "whisper"}', "is not a model that continues a prompt"),
        ('{"model_type": "zork", "auto_map": {"AutoConfig": "c.C"}}', "add --trust-remote-code if you trust it"),
    ],
)
def test_configurations_that_cannot_be_used(tmp_path: Path, config: str, complaint: str) -> None:
    line = refusal(model=config_only(tmp_path / "m", config), random_weights=True)
    assert complaint in line


def test_missing_and_broken_weights(tmp_path: Path) -> None:
    folder = models.save_llama(tmp_path / "llama")
    (folder / "model.safetensors").write_bytes(b"12345")
    assert refusal(model=str(folder)).startswith("llama could not be loaded: SafetensorError")
    (folder / "model.safetensors").unlink()
    assert refusal(model=str(folder)).startswith("llama has no weights: add --random-weights")


def test_a_folder_without_a_tokenizer_needs_random_weights(tmp_path: Path) -> None:
    folder = models.save_llama(tmp_path / "llama", with_tokenizer=False)
    assert "no tokenizer that transformers can load" in refusal(model=str(folder))
    prefill = prepare(PrefillOptions(model=str(folder), random_weights=True, device="cpu", prompt="the cat"))
    assert prefill.length == 282
    assert "the prompt that was given is not used" in prefill.notes


def test_an_image_for_a_text_model(tmp_path: Path, llama: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    assert refusal(model=str(llama), images=(str(tmp_path / "a.png"),)).startswith("llama takes text only")


def test_an_image_processor_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    folder = models.save_gemma4_config(tmp_path / "gemma")
    models.tokenizer(chat=True).save_pretrained(folder)
    line = refusal(model=str(folder), images=(str(tmp_path / "a.png"),))
    assert line.startswith("the image processor of gemma cannot be loaded")


def test_a_prompt_without_tokens(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": ""}')
    assert refusal(model=str(llama), input=str(tmp_path / "rows.jsonl")) == "the prompt has no tokens: give some text"


def test_devices_and_data_types_that_are_not_there(llama: Path) -> None:
    assert "'zork' is not a device" in refusal(model=str(llama), device="zork")
    assert "'int8' is not a data type" in refusal(model=str(llama), dtype="int8")
    missing = "xpu" if torch.cuda.is_available() else "cuda"
    assert f"there is no {missing} device" in refusal(model=str(llama), device=missing)


def test_a_model_larger_than_memory_is_refused_before_it_is_built(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "free_memory", lambda device: 1000)
    line = refusal(model=str(llama), random_weights=True)
    assert "llama takes 0.0 GB in torch.float32, but cpu has 0.0 GB free: keep fewer layers" in line


def test_the_first_layers_of_stored_weights_must_reach_full_attention(tmp_path: Path) -> None:
    folder = models.save_gemma4_config(tmp_path / "gemma")
    line = refusal(model=str(folder), layers=3)
    assert (
        line == "the first 3 layers of gemma do not end in a full-attention layer: --layers 6, or add --random-weights"
    )


def test_transformers_missing_or_too_old_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "5.9.1")
    with pytest.raises(InputError, match=r"transformers 5\.9\.1 is too old: pip install 'transformers>=5\.13'"):
        loading.transformers_version()

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(InputError, match="transformers is not installed: pip install"):
        loading.transformers_version()


ANSWERS = {
    "gated": (403, "GatedRepo", "org/gated is gated: accept its terms at https://huggingface.co/org/gated"),
    "missing": (401, "RepoNotFound", "there is no model org/missing on the hub, or it is private"),
    "revision": (404, "RevisionNotFound", "org/revision has no revision v9"),
    "refused": (403, "", "the hub refused org/refused (HTTP 403): log in"),
    "nofile": (404, "EntryNotFound", "the config.json of org/nofile is missing or has no model_type"),
}
"""What a hub answers for a repository, and how the line begins that the user reads."""


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers every request for org/NAME as `ANSWERS` says."""

    def do_HEAD(self) -> None:
        name = next((name for name in ANSWERS if f"org/{name}" in self.path), "nofile")
        status, code, _ = ANSWERS[name]
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: requests are not logged."""


@pytest.fixture
def hub() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_what_the_hub_refuses_is_said_in_one_line(hub: str, tmp_path: Path) -> None:
    script = (
        "import json, sys\n"
        "from sdpa_repro.capturing.prefill import PrefillOptions, prepare\n"
        "from sdpa_repro.errors import InputError\n"
        "lines = {}\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n"
        "        prepare(PrefillOptions(model='org/' + name, revision='v9' if name == 'revision' else None))\n"
        "    except InputError as error:\n"
        "        lines[name] = str(error)\n"
        "print(json.dumps(lines))\n"
    )
    around = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    around |= {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", script, *ANSWERS], env=around, capture_output=True, text=True, timeout=120, check=True
    )
    lines = json.loads(done.stdout.splitlines()[-1])
    for name, (_, _, begin) in ANSWERS.items():
        assert lines[name].startswith(begin)
        assert "\n" not in lines[name]
