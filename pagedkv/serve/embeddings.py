"""/v1/embeddings, /tokenize and /detokenize: vectors and token ids of texts."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from pagedkv.engine.outputs import EmbeddingOutput
from pagedkv.engine.requests.prompts import ids_of

from .errors import ApiError, json_response, of_engine
from .schema import DetokenizeRequest, EmbeddingRequest, TokenizeRequest, prompts_of, salt_of
from .server import Server
from .sse import JSON, Reply
from .tools import read_tools
from .turn import encode_messages


async def embeddings(server: Server, request: Request) -> Reply:
    body, headers = await server.read(request, EmbeddingRequest)
    name = server.model.check_name(body.model)
    if not server.model.makes_embeddings:
        raise ApiError(400, f"{name} is no embedding model: its folder has no modules.json", param="model")
    if body.encoding_format not in (None, "float", "base64"):
        raise ApiError(
            400, f"encoding_format is {body.encoding_format!r} but must be float or base64", param="encoding_format"
        )
    server.check_queue()
    return Reply(_embed(server, body, name, prompts_of("input", body.input)), JSON, headers)


async def _embed(
    server: Server, body: EmbeddingRequest, name: str, prompts: list[str | list[int]]
) -> AsyncGenerator[bytes, None]:
    server.gate.enter(len(prompts))
    priority, salt = body.priority or 0, salt_of(body.cache_salt)
    lora = server.model.adapters.get(name)
    embed = partial(server.client.embed, lora_request=lora, priority=priority, salt=salt)
    calls = [asyncio.ensure_future(embed(each)) for each in prompts]
    try:
        outputs = await asyncio.gather(*calls)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ApiError(400, str(error)) from error
    except RuntimeError as error:
        raise ApiError(503, f"the engine serves nothing any more: {error}") from error
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        server.gate.leave(len(prompts))
    count = sum(len(output.prompt_token_ids) for output in outputs)
    for i, output in enumerate(outputs):
        if output.error is not None:
            raise of_engine(output.error, f"input[{i}]" if len(outputs) > 1 else "")
    data = [_row(index, output, body) for index, output in enumerate(outputs)]
    usage = {"prompt_tokens": count, "total_tokens": count}
    yield msgspec.json.encode({"object": "list", "data": data, "model": name, "usage": usage})


def _row(index: int, output: EmbeddingOutput, body: EmbeddingRequest) -> dict[str, Any]:
    vector = np.ascontiguousarray(output.embedding, "<f4")
    if body.dimensions not in (None, len(vector)):
        text = f"dimensions is {body.dimensions} but the model's vectors have {len(vector)}"
        raise ApiError(400, text, param="dimensions", code="unsupported_parameter")
    shown = base64.b64encode(vector.tobytes()).decode() if body.encoding_format == "base64" else vector.tolist()
    return {"object": "embedding", "index": index, "embedding": shown}


async def tokenize(server: Server, request: Request) -> Response:
    body, headers = await server.read(request, TokenizeRequest)
    model = server.model
    model.check_name(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "prompt or messages must be given, one of the two", param="prompt")
    if body.messages is not None:
        tools = read_tools(body.tools, None, None).definitions or None
        how = model, body, tools, model.template(tools), body.chat_template_kwargs
        ids = ids_of((await asyncio.to_thread(encode_messages, *how))[1])
    else:
        ids = await asyncio.to_thread(model.encode, body.prompt or "", body.add_special_tokens is not False)
    return json_response({"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids}, headers=headers)


async def detokenize(server: Server, request: Request) -> Response:
    body, headers = await server.read(request, DetokenizeRequest)
    server.model.check_name(body.model)
    if body.tokens is None:
        raise ApiError(400, "tokens is missing: it must be a list of token ids", param="tokens")
    text = await asyncio.to_thread(server.model.decode, body.tokens)
    return json_response({"prompt": text}, headers=headers)
