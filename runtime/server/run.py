"""The server process: it starts the engine first, and gets itself ready while the engine loads."""

from __future__ import annotations

import asyncio
import errno
import math
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..options import EngineOptions, TextOptions
from ..stderr import patient_stderr
from .options import HttpOptions

if TYPE_CHECKING:
    from starlette.types import ASGIApp
    from uvicorn import Server

    from ..client import EngineClient
    from .record import Observer
    from .service import Service
    from .workers import WorkerOptions

BACKLOG = 2048
KEEP_ALIVE_SECONDS = 60


@patient_stderr()
def serve(
    directory: Path,
    options: EngineOptions,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    text: TextOptions | None = None,
    http: HttpOptions | None = None,
) -> None:
    """Serve a plan until SIGTERM or SIGINT.

    Raises UserError if the address is taken or the plan or an option can't be used, InternalError if the engine fails
    before it is ready.
    """
    began = time.monotonic()
    http = http or HttpOptions()
    tls = tls_context(http)
    listener = listen_unix(http.uds) if http.uds else listen(host, port)
    from ..process import spawn_engine

    engine = spawn_engine(directory, options)
    told: dict[str, Any] = {"directory": directory.absolute(), "options": options, "http": http}
    told["text"] = text or TextOptions()
    with ExitStack() as cleanup:
        if http.uds:
            cleanup.callback(http.uds.unlink, missing_ok=True)
        if http.api_workers > 1:
            from .logs import configure_logs
            from .workers import serve_workers

            configure_logs(http.log_format, http.log_level, requests=http.enable_log_requests)
            address = _address(listener, tls is not None)
            serve_workers(engine, listener, address, began, **told)
        else:
            run_service(engine, listener, began=began, **told)


def run_service(
    engine: EngineClient,
    listener: socket.socket,
    *,
    directory: Path,
    options: EngineOptions,
    http: HttpOptions,
    text: TextOptions,
    began: float = 0.0,
    worker: WorkerOptions | None = None,
) -> None:
    """Serve an engine until SIGTERM or SIGINT, alone or as one `worker` of several."""
    # What is imported here is so while the engine loads.
    from ..prompt import Prompts
    from .logs import configure_logs, log_request
    from .service import Service

    configure_logs(http.log_format, http.log_level, requests=http.enable_log_requests)
    observers: list[Observer] = [log_request]
    lanes = options.max_num_seqs or engine.plan.max_batch
    most_open = math.ceil((lanes + http.max_queued_requests) / http.api_workers) if http.max_queued_requests else 0
    service = Service(
        engine.plan,
        engine,
        partial(Prompts.open, directory, engine.plan, text),
        most_open=most_open,
        request_timeout=http.request_timeout,
    )
    with ExitStack() as cleanup:
        if http.otlp_traces_endpoint:
            from .tracing import Tracer

            tracer = Tracer(http.otlp_traces_endpoint, service.model)
            cleanup.callback(tracer.close)
            observers.append(tracer)
        server = _make_server(service, http, observers, worker)
        if worker is None:
            server.config.ssl = tls_context(http)
            asyncio.run(_serve(service, engine, server, listener, began))
        else:
            asyncio.run(_serve_shared(service, engine, server, listener, worker))


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; who connects before the server is up waits for it. Raises UserError if it can't be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"port {port} on {host} is in use: stop what uses it, or choose another --port") from None
        raise UserError(f"can't listen on {host} port {port}: {error.strerror or error}") from None
    return listener


def listen_unix(path: Path) -> socket.socket:
    """A listening Unix socket; one left by a dead server is replaced. Raises UserError if it can't be had."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(str(path)) == 0:
                    raise UserError(f"{path} is in use: stop what uses it, or choose another --uds")
            path.unlink()
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise UserError(f"can't listen on {path}: {error.strerror or error}") from None
    except UserError:
        listener.close()
        raise
    return listener


def tls_context(http: HttpOptions) -> ssl.SSLContext | None:
    """What TLS needs; None without a certificate. Raises UserError if the files can't be used."""
    if http.ssl_certfile is None:
        if http.ssl_keyfile or http.ssl_ca_certs:
            raise UserError("--ssl-keyfile and --ssl-ca-certs need --ssl-certfile")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(http.ssl_certfile, http.ssl_keyfile, lambda: http.ssl_keyfile_password or "")
        if http.ssl_ca_certs is not None:
            context.load_verify_locations(http.ssl_ca_certs)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:
        raise UserError(f"the TLS certificate or key can't be used: {error}") from None
    return context


def _address(listener: socket.socket, tls: bool) -> str:
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    address, port = listener.getsockname()[:2]
    host = f"[{address}]" if ":" in address else address
    return f"http{'s' if tls else ''}://{host}:{port}"


async def _serve(service: Service, engine: EngineClient, server: Server, listener: socket.socket, began: float) -> None:
    from .logs import log_serving

    address = _address(listener, server.config.ssl is not None)
    service.start()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    ready = asyncio.create_task(_ready(service, engine))
    try:
        await asyncio.wait({serving, ready}, return_when=asyncio.FIRST_COMPLETED)
        if ready.done() and ready.exception() is None:
            log_serving(service.model, address, time.monotonic() - began)
        elif ready.done():
            server.should_exit = server.force_exit = True
        dead = asyncio.create_task(engine.failed())
        await asyncio.wait({serving, dead}, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            server.should_exit = True
        await serving
        if ready.done():
            ready.result()
        if dead.done():
            raise dead.result()
    finally:
        ready.cancel()
        await service.stop()
        await engine.close()


async def _ready(service: Service, engine: EngineClient) -> None:
    await service.prompts()
    await engine.ready()
    await service.heart.stats()  # so that whoever reads that we serve finds us ready


async def _serve_shared(
    service: Service, engine: EngineClient, server: Server, listener: socket.socket, worker: WorkerOptions
) -> None:
    """Serve as one worker of several: its peers at a Unix socket, and connections of the socket that all share."""
    loop, config, tls = asyncio.get_running_loop(), server.config, tls_context(worker.http)
    make_protocol: Callable[..., asyncio.Protocol] = config.http_protocol_class
    accepted: set[asyncio.Task[Any]] = set()

    def accept() -> None:
        # One at a time: a worker that has much to do turns its loop more slowly, and leaves more to others.
        if server.should_exit:
            loop.remove_reader(listener)
            return
        try:
            connection, _ = listener.accept()
        except OSError:
            return  # another worker was faster
        connection.setblocking(False)
        protocol = partial(make_protocol, config=config, server_state=server.server_state, app_state={})
        task = loop.create_task(loop.connect_accepted_socket(protocol, connection, ssl=tls))
        accepted.add(task)
        task.add_done_callback(_accepted(accepted))

    service.start()
    with listen_unix(worker.peer(worker.index)) as private:
        loop.add_reader(listener, accept)
        try:
            await server.serve(sockets=[private])
        finally:
            loop.remove_reader(listener)
            await service.stop()
            await engine.close()


def _accepted(tasks: set[asyncio.Task[Any]]) -> Callable[[asyncio.Task[Any]], None]:
    def done(task: asyncio.Task[Any]) -> None:
        tasks.discard(task)
        if not task.cancelled():
            task.exception()  # a handshake that failed is the client's affair

    return done


def _make_server(
    service: Service, http: HttpOptions, observers: Sequence[Observer], worker: WorkerOptions | None
) -> Server:
    from uvicorn import Config, Server

    from .app import create_app
    from .http import guarded
    from .peers import Peers

    app: ASGIApp = create_app(service, page=http.page)
    if worker is not None:
        app = Peers(app, worker.index, [worker.peer(index) for index in range(http.api_workers)])

    class GracefulServer(Server):
        """Ends by itself on a signal, where the base class would raise the signal again and skip our own clean-up."""

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            handlers = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
            try:
                yield
            finally:
                for number, handler in handlers.items():
                    signal.signal(number, handler)

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            self.force_exit = self.should_exit
            self.should_exit = True
            if self.force_exit:
                asyncio.get_running_loop().call_soon_threadsafe(self.abort_connections)

        def abort_connections(self) -> None:
            """Since Python 3.12 a server that closes waits for its connections, which is not at once."""
            for connection in list(self.server_state.connections):
                connection.transport.abort()

    config = Config(
        guarded(app, http, observers),
        root_path=http.root_path,
        loop="asyncio",
        http="auto",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=math.ceil(http.shutdown_timeout),
    )
    config.load()
    return GracefulServer(config)
