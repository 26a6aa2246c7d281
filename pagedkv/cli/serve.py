"""pagedkv serve: an HTTP server in OpenAI's form."""

from __future__ import annotations

import argparse
import re
import resource
import ssl
from pathlib import Path
from typing import Any

from pagedkv.engine.lora_request import LoRARequest
from pagedkv.optional import need
from pagedkv.serve.formats import CALL_FORMATS

from .options import MODEL_HELP, Commands, add_engine_options, engine_options, integer, read_text

EXAMPLES = """\
examples:
  pagedkv serve Qwen/Qwen3-0.6B
  pagedkv serve ./model --host 0.0.0.0 --port 8080 --api-key one --api-key another --max-model-len 8192
  curl localhost:8000/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Hello"}]}'

SIGTERM or Ctrl-C: no more requests are taken, and answers on their way come to their ends. A second one stops.
"""
MAX_FRONT_ENDS = 256  # processes of 60 MB
MAX_DESCRIPTORS = 1 << 16
REASONING_PARSERS = "auto", "qwen3", "none"
PACKAGES = "starlette", "uvicorn", "httptools", "msgspec", "prometheus_client"


def add(commands: Commands) -> None:
    text = "serve a model of your own over HTTP, in OpenAI's form"
    serve = commands.add_parser("serve", help=text, description=text, epilog=EXAMPLES)
    serve.add_argument("model", help=MODEL_HELP)
    where = serve.add_argument_group("server")
    where.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen at, or a name, which is all its addresses (default: %(default)s)",
    )
    where.add_argument("--port", type=int, default=8000, help="0: any free one (default: %(default)s)")
    where.add_argument("--uds", metavar="PATH", help="a Unix socket instead of host and port")
    help = "processes that speak HTTP, beside the engine's own (default: %(default)s)"
    where.add_argument("--front-ends", metavar="N", type=integer, default=1, help=help)
    help = "what requests must bring as 'Authorization: Bearer KEY'; may be repeated; none: anybody may ask"
    where.add_argument("--api-key", metavar="KEY", action="append", default=[], help=help)
    help = "a file with such keys, one a line: other users of this machine do not see them there"
    where.add_argument("--api-key-file", metavar="FILE", help=help)
    where.add_argument("--ssl-certfile", metavar="FILE", help="HTTPS, with this certificate (PEM)")
    where.add_argument("--ssl-keyfile", metavar="FILE", help="the certificate's key, where it is in a file of its own")
    help = "only clients with a certificate that one of these has signed"
    where.add_argument("--ssl-ca-certs", metavar="FILE", help=help)
    help = "what clients call the model; may be repeated (default: MODEL)"
    where.add_argument("--served-model-name", metavar="NAME", action="append", default=[], help=help)
    add_serving_options(where)
    help = "pages from there may ask (CORS); may be repeated; *: all"
    where.add_argument("--allowed-origin", metavar="ORIGIN", action="append", default=[], help=help)
    help = "bytes of a request, more get 413 (default: %(default)s)"
    where.add_argument("--max-body-size", metavar="N", type=integer, default=8 << 20, help=help)
    help = "answers in work or waiting at a time, further requests get 429 (default: %(default)s)"
    where.add_argument("--max-answers", metavar="N", type=integer, default=1024, help=help)
    help = "while more answers than these wait in the engine, requests get 429; not given: no matter how many"
    where.add_argument("--max-waiting", metavar="N", type=int, help=help)
    help = "seconds of a step after which /health says 503: the engine is stuck (default: %(default)s)"
    where.add_argument("--stuck-after", metavar="N", type=float, default=120.0, help=help)
    help = "seconds of silence after which a stream gets a comment, 0: never (default: %(default)s)"
    where.add_argument("--sse-keep-alive-interval", metavar="N", type=float, default=15.0, help=help)
    where.add_argument("--no-page", action="store_true", help="nothing at /: no page that shows what the engine does")
    help = "paths for training loops: /sleep, /wake_up, /pause, /resume, /update_weights, ...; any client may use them"
    where.add_argument("--enable-admin", action="store_true", help=help)
    help = "a line a second on stderr, while there are requests: how many, by status"
    where.add_argument("--access-log", action="store_true", help=help)
    help = "seconds for answers on their way after the first signal; not given: as long as they take"
    where.add_argument("--drain-timeout", metavar="N", type=integer, help=help)
    add_engine_options(serve)
    serve.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    keys, tls = _keys(args), _tls(args)
    if not 0 <= args.port < 1 << 16:  # the resolver would take it modulo 65536
        raise ValueError(f"--port is {args.port} but must be in 0..65535")
    if args.front_ends > MAX_FRONT_ENDS:
        raise ValueError(f"--front-ends is {args.front_ends} but must be at most {MAX_FRONT_ENDS}")
    for origin in args.allowed_origin:  # others are never equal to what a browser sends
        if not re.fullmatch(r"\*|[a-z][a-z0-9+.-]*://[^/]+", origin):
            raise ValueError(f"--allowed-origin is {origin!r} but must be SCHEME://HOST, perhaps with :PORT, or *")
    if args.max_waiting is not None and args.max_waiting < 0:
        raise ValueError(f"--max-waiting is {args.max_waiting} but must be at least 0")
    if not args.stuck_after > 0:
        raise ValueError(f"--stuck-after is {args.stuck_after} but must be above 0")
    if not args.sse_keep_alive_interval >= 0:
        raise ValueError(f"--sse-keep-alive-interval is {args.sse_keep_alive_interval} but must be at least 0")
    names = args.served_model_name or [args.model]
    options, template, adapters = serving_options(args, names)
    need("pagedkv serve", "serve", *PACKAGES)
    import asyncio

    from pagedkv.serve.front_end import Options
    from pagedkv.serve.lifecycle import addresses_of, bind, bind_path
    from pagedkv.serve.supervisor import Supervisor

    count = args.front_ends
    front = Options(
        names, chat_template=template, adapters=adapters, tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        limits={
            "max_body_size": args.max_body_size, "max_answers": args.max_answers,
            "max_waiting": args.max_waiting, "stuck_after": args.stuck_after,
            "keep_alive": args.sse_keep_alive_interval,
        },
        app={
            "api_keys": keys, "origins": args.allowed_origin, "access_log": args.access_log,
            "with_page": not args.no_page, "with_admin": args.enable_admin,
        },
        http={"drain_timeout": args.drain_timeout} | tls,
    )  # fmt: skip
    # Before the model is loaded, which takes longer. Nobody can connect until a front end listens.
    _allow_connections()
    try:
        listeners = bind(args.host, args.port) if args.uds is None else [bind_path(args.uds)]
    except OSError as error:
        where = f"--host is {args.host!r}, --port is {args.port}" if args.uds is None else f"--uds is {args.uds!r}"
        raise OSError(f"{where}: {error.strerror or error}") from None
    ready = f"pagedkv serve: {addresses_of(listeners, 'https' if args.ssl_certfile else 'http')} serves {names[0]}"
    try:
        return asyncio.run(Supervisor(listeners, front, count).run(args.model, options | engine_options(args), ready))
    finally:
        if args.uds is not None:
            Path(args.uds).unlink(missing_ok=True)


def _allow_connections() -> None:
    """Each takes a descriptor, and many systems allow a process 1,024 unless it asks for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _tls(args: argparse.Namespace) -> dict[str, Any]:
    """uvicorn's options."""
    if args.ssl_certfile is None:
        if args.ssl_keyfile is not None or args.ssl_ca_certs is not None:
            raise ValueError("--ssl-keyfile or --ssl-ca-certs is given, but --ssl-certfile is not")
        return {}
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    found = {"ssl_certfile": args.ssl_certfile, "ssl_keyfile": args.ssl_keyfile}
    name, value = "--ssl-certfile", f"{args.ssl_certfile!r}, with the key in {args.ssl_keyfile or args.ssl_certfile!r}"
    try:
        context.load_cert_chain(args.ssl_certfile, args.ssl_keyfile)
        if args.ssl_ca_certs is not None:
            name, value = "--ssl-ca-certs", repr(args.ssl_ca_certs)
            context.load_verify_locations(args.ssl_ca_certs)
            found |= {"ssl_ca_certs": args.ssl_ca_certs, "ssl_cert_reqs": ssl.CERT_REQUIRED}
    except OSError as error:
        raise OSError(f"{name} is {value}: {error}") from None
    return found


def add_serving_options(group: argparse._ActionsContainer) -> None:
    """How answers are made and read."""
    group.add_argument("--chat-template", metavar="FILE", help="a Jinja template instead of the model's own")
    help = "an adapter of low rank, which clients ask for by its name as for a model; may be repeated"
    group.add_argument("--lora", metavar="NAME=FOLDER", action="append", default=[], help=help)
    help = "how the model writes calls of tools (default: as its chat template does)"
    group.add_argument("--tool-call-parser", choices=("auto", *CALL_FORMATS), default="auto", help=help)
    help = "whether the model thinks between <think> and </think> (default: where its chat template says so)"
    group.add_argument("--reasoning-parser", choices=REASONING_PARSERS, default="auto", help=help)


def serving_options(
    args: argparse.Namespace, names: list[str]
) -> tuple[dict[str, Any], str | None, dict[str, LoRARequest]]:
    """Options of the engine, the text of the template, and adapters, whose names are none of these."""
    template = None if args.chat_template is None else read_text(args.chat_template)
    adapters = _adapters(args.lora, names)
    return {"enable_lora": True, "max_loras": len(adapters)} if adapters else {}, template, adapters


def _keys(args: argparse.Namespace) -> list[str]:
    if "" in args.api_key:
        raise ValueError("--api-key is empty")
    if args.api_key_file is None:
        return list(args.api_key)
    found = list(filter(None, map(str.strip, read_text(args.api_key_file).splitlines())))
    if not found:  # else anybody might ask
        raise ValueError(f"--api-key-file is {args.api_key_file!r}, which has no key")
    return [*args.api_key, *found]


def _adapters(given: list[str], names: list[str]) -> dict[str, LoRARequest]:
    adapters: dict[str, LoRARequest] = {}
    for number, text in enumerate(given, 1):
        name, _, folder = text.partition("=")
        if not name or not folder:
            raise ValueError(f"--lora is {text!r} but must be NAME=FOLDER")
        if name in adapters or name in names:
            raise ValueError(f"--lora is {text!r}, but {name!r} is served already")
        if not (Path(folder) / "adapter_config.json").is_file():
            raise FileNotFoundError(f"--lora is {text!r}, but there is no {folder}/adapter_config.json")
        adapters[name] = LoRARequest(name, number, folder)
    return adapters
