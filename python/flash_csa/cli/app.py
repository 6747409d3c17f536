"""The commands, and what happens on bad input: exit code 2 and one line on stderr."""

import sys

import typer
from typer.core import TyperGroup

from . import accuracy, bytes, demo, info, plan, traffic

_UsageError = typer.BadParameter.__base__  # of whichever click this typer is built on


class _Commands(TyperGroup):
    """Bad input is a usage error of the parser or a ValueError of the library."""

    def main(self, *args, **kwargs):
        try:
            code = super().main(*args, **{**kwargs, "standalone_mode": False})
        except _UsageError as error:
            _fail(error.format_message())
        except ValueError as error:
            _fail(str(error))
        except (KeyboardInterrupt, typer.Abort):
            code = 130
        sys.exit(code)


def _fail(message: str) -> None:
    line = " ".join(message.split())
    print(line if line.startswith("flash_csa") else f"flash_csa: {line}", file=sys.stderr)
    sys.exit(2)


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Compressed sparse attention on the 890 bytes/token cache.",
)


@app.callback(invoke_without_command=True)
def _help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


app.command("demo")(demo.command)
app.command("info")(info.command)
app.command("bytes")(bytes.command)
app.command("traffic")(traffic.command)
app.command("accuracy")(accuracy.command)
app.command("plan")(plan.command)
