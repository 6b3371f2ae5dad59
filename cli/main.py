"""The command line. A command is imported when it runs, so that `toolkit serve` never loads what compiling needs."""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from types import MappingProxyType

import click

from ..runtime.debug import debug_level
from ..runtime.errors import InternalError, UserError

COMMANDS = MappingProxyType(
    {
        "compile": ("compile_", "Turn a model into a plan."),
        "serve": ("serve", "Serve a plan over HTTP, with an OpenAI-compatible API."),
        "run-batch": ("run_batch", "Answer a file of requests."),
        "generate": ("generate", "Complete one prompt."),
        "chat": ("chat", "Talk to a plan or a server."),
        "bench": ("bench", "Measure latency, throughput, serving and kernels."),
        "tune": ("tune_plan", "Find out on a GPU which of a plan's kernels are fastest there."),
        "models": ("models", "List the tested architectures."),
        "inspect": ("inspect.command", "Show what is in a plan."),
        "doctor": ("doctor", "Check what this machine can compile and run."),
    }
)
"""Name -> (module below `toolkit.cli` that has it as `command`, what it does)."""


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f".{COMMANDS[cmd_name][0]}", __package__).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="plan-toolkit", prog_name="toolkit")
def group() -> None:
    """Compile a language model into a self-contained plan, and run the plan.

    \b
    Examples:
      toolkit compile HuggingFaceTB/SmolLM2-135M-Instruct --target cpu -o plan/
      toolkit serve plan/

    TOOLKIT_DEBUG=1..4 shows each stage on stderr.
    """


def run(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code: 0, 1 for our faults, 2 for the user's, 130 for Ctrl-C."""
    try:
        debug_level()
        result = group.main(arguments, prog_name="toolkit", standalone_mode=False)
    except UserError as error:
        _say(str(error))
        return 2
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        _say("stopped")
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output is gone: there is nobody to tell
        return 141
    except InternalError as error:
        _say(f"internal error, please report it: {error}")
        return 1
    return result if isinstance(result, int) else 0


def _say(text: str) -> None:
    click.echo(f"toolkit: {text}", err=True)


def main() -> None:
    """Entry point of the `toolkit` command."""
    code = run()
    gc.freeze()  # the process ends: to look for garbage among a million objects takes half a second
    sys.exit(code)


if __name__ == "__main__":
    main()
