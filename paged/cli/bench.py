"""`paged bench`: the time of scheduler, attention and engine on this machine."""

from paged.cli.bench_attention import attention
from paged.cli.bench_engine import engine
from paged.cli.bench_scheduler import scheduler
from paged.cli.bench_step import step
from paged.cli.commands import group_of

bench = group_of("Measure the scheduler, attention and the engine on this machine.", scheduler, attention, engine, step)
