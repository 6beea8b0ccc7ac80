"""The prompts a user gives, on the command line or as rows of a file, with their images opened."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdpa_repro.capturing.load_errors import first_line
from sdpa_repro.capturing.options import PrefillOptions
from sdpa_repro.errors import InputError

TEXT_PROMPT = "Explain in a few sentences how attention works in a transformer, and why a mask is needed."
IMAGE_PROMPT = "Describe this image in detail."

Message = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One prompt of a batch: chat messages whose content is a list of parts.

    Parts are {"type": "text", "text": ...} and {"type": "image", "image": a PIL image} or {"url": ...}.
    """

    messages: list[Message]

    @property
    def images(self) -> list[Any]:
        """The images of the row in order."""
        return [part.get("image", part.get("url")) for part in self._parts("image")]

    @property
    def text(self) -> str:
        """All the text of the row."""
        return "\n".join(str(part["text"]) for part in self._parts("text"))

    def _parts(self, kind: str) -> list[dict[str, Any]]:
        return [part for message in self.messages for part in message["content"] if part["type"] == kind]


def read_rows(options: PrefillOptions) -> list[Row]:
    """The prompts that `options` ask for: the rows of `input`, or one row of `prompt` and `images`.

    Rows of the file: {"messages": [...]} in the form of transformers' chat templates, or {"prompt": "...",
    "image": "path"} or {"prompt": "...", "images": ["path", ...]}; paths are relative to the file. Raises
    InputError with the line number.
    """
    if options.input is None:
        prompt = options.prompt or (IMAGE_PROMPT if options.images and not options.text_only else TEXT_PROMPT)
        images = () if options.text_only else options.images
        return [_plain(prompt, images, Path())]
    path = Path(options.input)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {first_line(error)}") from error
    rows = [
        _row(line, f"{path} line {number}", path.parent, text_only=options.text_only)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not rows:
        raise InputError(f'{path} has no rows: one JSON object a line, such as {{"prompt": "..."}}')
    return rows


def _row(line: str, where: str, folder: Path, *, text_only: bool) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise InputError(f"{where} is not a JSON object")
    messages = row.get("messages")
    if isinstance(messages, list) and messages:
        return Row([_message(message, where, folder, text_only) for message in messages])
    if not isinstance(row.get("prompt"), str):
        raise InputError(f'{where} has neither "messages" (a list) nor "prompt" (a string)')
    images = row.get("images", [row["image"]] if row.get("image") else [])
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise InputError(f'{where}: "images" must be a list of paths or URLs')
    try:
        return _plain(row["prompt"], () if text_only else images, folder)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def _plain(prompt: str, images: Sequence[str], folder: Path) -> Row:
    parts = [*(_image_part(image, folder) for image in images), {"type": "text", "text": prompt}]
    return Row([{"role": "user", "content": parts}])


def _message(message: Any, where: str, folder: Path, text_only: bool) -> Message:
    """One message in the form of transformers, its images opened."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InputError(f'{where}: a message is an object with "role" and "content"')
    content = message.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise InputError(f'{where}: "content" is a string or a list of parts')
    parts: list[dict[str, Any]] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        elif kind in ("image", "image_url"):
            link = part.get("image_url")
            link = link.get("url") if isinstance(link, dict) else link
            sources = (part.get("image"), part.get("path"), part.get("url"), link)
            source = next((one for one in sources if isinstance(one, str)), None)
            if source is None:
                raise InputError(f'{where}: an image part needs "path" or "url"')
            if not text_only:
                try:
                    parts.append(_image_part(source, folder))
                except InputError as error:
                    raise InputError(f"{where}: {error}") from error
        else:
            raise InputError(f"{where}: a part of type {kind!r} is not supported: use text and image")
    return {**message, "content": parts}


def _image_part(source: str, folder: Path) -> dict[str, Any]:
    """A content part for an image: opened when it is a file, left to transformers when it is a URL."""
    if source.startswith(("http://", "https://", "data:")):
        return {"type": "image", "url": source}
    return {"type": "image", "image": open_image(folder / source)}


def open_image(path: Path) -> Any:
    """The image of a file as RGB. Raises InputError when it is missing, unreadable, or pillow is not installed."""
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise InputError("images need pillow: pip install pillow") from None
    try:
        with Image.open(path) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except FileNotFoundError:
        raise InputError(f"there is no image {path}") from None
    except Exception as error:
        raise InputError(f"{path} is not an image that pillow can read: {first_line(error)}") from error
