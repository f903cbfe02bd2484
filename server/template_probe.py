"""What a model's template and tokenizer make of the probe chats of router/registry/compat.py."""

from __future__ import annotations

from collections.abc import Mapping

from engine.errors import RequestError
from engine.protocol import TextAssets
from engine.text.chat import ChatTemplate
from engine.text.tokenizer import TextCodec
from router.registry.compat import PROBE_CHATS, probe_digest


def template_probe(text: TextAssets, assets: Mapping[str, bytes]) -> str:
    """Return the digest that goes into a worker's compatibility; the same for templates that differ in looks alone.

    A template that writes the date gives another digest every day: for such a model leave the probe out, so that the
    template's own text is compared.
    """
    codec = TextCodec.from_assets(text, assets)
    template = ChatTemplate.from_assets(text, assets)
    return probe_digest([_ids(codec, template, chat) for chat in PROBE_CHATS])


def _ids(codec: TextCodec, template: ChatTemplate | None, chat: tuple[dict[str, str], ...]) -> list[int]:
    if template is None:
        return codec.encode("\n".join(message["content"] for message in chat), parse_special=True)
    try:
        return codec.encode(template.render(chat), parse_special=True)
    except RequestError:
        return []  # it refuses such chats, as every worker of this model must
