"""POST /tokenize and /detokenize, also under /v1: text or messages to token ids, and ids to text."""

from __future__ import annotations

from collections.abc import Mapping

from engine.errors import RequestError
from server.openai.body import parse_body
from server.openai.extras import ignored_text_params
from server.openai.json_endpoint import Answer, Reply
from server.openai.tokenize_body import DetokenizeBody, TextBody, TokenizeBody
from server.openai.truncation import kept_tokens
from server.service import Service
from server.text_service import TextService


async def tokenize(service: Service, body: bytes) -> Reply:
    """Return the ids that a completion or a chat completion with this prompt would run on."""
    request = await parse_body(body, TokenizeBody)
    ignored = ignored_text_params(request.model_extra or {})
    text = _text(service, request)
    ids = await (_prompt_ids(text, request) if request.messages is None else _chat_ids(text, request))
    names = await text.in_thread(lambda: list(map(text.codec.token_text, ids))) if request.return_token_strs else None
    answer = {"count": len(ids), "max_model_len": text.info.max_model_len, "tokens": ids, "token_strs": names}
    return Reply(answer, ignored)


async def detokenize(service: Service, body: bytes) -> Reply:
    """Return the text of the ids, special tokens by name."""
    request = await parse_body(body, DetokenizeBody)
    ignored = ignored_text_params(request.model_extra or {})
    text = _text(service, request)
    return Reply({"prompt": await text.shown_text(request.tokens)}, ignored)


TEXT_ROUTES: Mapping[str, Answer] = {
    "/tokenize": tokenize,
    "/v1/tokenize": tokenize,
    "/detokenize": detokenize,
    "/v1/detokenize": detokenize,
}


def _text(service: Service, request: TextBody) -> TextService:
    return service.model(request.model).require_text()


async def _prompt_ids(text: TextService, request: TokenizeBody) -> list[int]:
    if request.prompt is None:
        raise RequestError(
            "Missing required parameter: 'prompt' or 'messages'.", param="prompt", code="missing_required_parameter"
        )
    for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools"):
        if getattr(request, name):
            raise RequestError(f"'{name}' needs 'messages'.", param=name)
    add_special = request.add_special_tokens is not False
    keep = kept_tokens(request.truncate_prompt_tokens, text.info, None)
    (ids,) = await text.prompts_ids([request.prompt], add_special_tokens=add_special, keep=keep, to_run=False)
    return ids


async def _chat_ids(text: TextService, request: TokenizeBody) -> list[int]:
    continues = request.continue_final_message
    if continues and request.add_generation_prompt:
        raise RequestError(
            "'continue_final_message' and 'add_generation_prompt' exclude each other.", param="continue_final_message"
        )
    add_generation = not continues if request.add_generation_prompt is None else request.add_generation_prompt
    ids = await text.chat_ids(
        [message.for_template() for message in request.messages or ()],
        add_generation_prompt=add_generation,
        continue_final_message=continues,
        variables=request.chat_template_kwargs,
        tools=request.tools,
        to_run=False,
    )
    if request.add_special_tokens:
        ids = text.codec.encode("", parse_special=True, add_bos=True) + ids
    keep = kept_tokens(request.truncate_prompt_tokens, text.info, None)
    return ids if keep is None else ids[-keep:]
