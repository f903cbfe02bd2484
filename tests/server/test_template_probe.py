"""The probe tells templates and tokenizers apart by what they do."""

from __future__ import annotations

import hashlib

import msgspec

from engine.protocol import AssetRef, TextAssets
from router.registry.compat import compatibility_digest
from server.template_probe import template_probe
from tests.support.infos import engine_info
from tests.support.tiny_text import CHAT_TEMPLATE, text_assets


def with_template(source: str) -> tuple[TextAssets, dict[str, bytes]]:
    text, assets = text_assets()
    data = source.encode()
    digest = hashlib.sha256(data).hexdigest()
    return msgspec.structs.replace(text, chat_template=AssetRef(digest, len(data))), {**assets, digest: data}


def test_templates_that_do_the_same_have_one_probe() -> None:
    plain = template_probe(*with_template(CHAT_TEMPLATE))
    assert template_probe(*with_template("{# a comment #}" + CHAT_TEMPLATE)) == plain
    assert template_probe(*with_template(CHAT_TEMPLATE + "!")) != plain
    assert template_probe(*text_assets(with_template=False)) != plain
    refusing = "{{ raise_exception('no') }}"
    assert template_probe(*with_template(refusing)) == template_probe(*with_template(refusing + " "))


def test_the_probe_decides_over_the_templates_text() -> None:
    one, two = with_template(CHAT_TEMPLATE), with_template("{# a comment #}" + CHAT_TEMPLATE)
    digests = {compatibility_digest(engine_info(text=text), template_probe(text, files)) for text, files in (one, two)}
    assert len(digests) == 1
    assert len({compatibility_digest(engine_info(text=text)) for text, _ in (one, two)}) == 2
