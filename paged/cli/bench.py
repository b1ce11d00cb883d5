"""`paged bench`: the time of scheduler, attention and engine on this machine."""

import typer

from paged.cli.bench_attention import attention
from paged.cli.bench_engine import engine
from paged.cli.bench_scheduler import scheduler
from paged.cli.bench_step import step
from paged.cli.commands import Command, Group

bench_app = typer.Typer(
    help="Measure the scheduler, attention and the engine on this machine.", cls=Group, no_args_is_help=False
)
for _command in (scheduler, attention, engine, step):
    bench_app.command(cls=Command)(_command)


@bench_app.callback(invoke_without_command=True)
def _bench(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
