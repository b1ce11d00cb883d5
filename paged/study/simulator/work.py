"""The work of batches: the amounts that a cost model turns into seconds."""

import numpy as np

from paged import Batch
from paged.study.hardware import Spans, StepWork, Tiling
from paged.study.hardware.step_work import mean_pairs, mean_read
from paged.study.simulator.stretch import SteadyBatch


def work_of(batch: Batch, block_size: int, tiling: Tiling | None = None, spans: Spans = ()) -> StepWork:
    """Return a batch's work; with `tiling` its tiles, too, and contexts as far as layers attend (`spans`)."""
    moves, ends, counts = batch.moves, batch.seq_lens, batch.num_tokens
    num_rows, computed = len(batch.rows), batch.num_scheduled_tokens
    context = mean_read(spans, ends - counts, ends)
    read = context.sum().item()
    decoding, attended = context, read
    if computed != num_rows:
        attended = mean_pairs(spans, ends - counts, ends)
        decoding = context[(counts == 1) & batch.samples]
    num_tiles = sampling = positions = 0
    if tiling is not None:
        longest = tiling.longest_contexts(batch.positions + 1)
        num_tiles, positions = len(longest), int(tiling.whole_pieces(longest).sum())
        sampling = len(np.unique((batch.query_start_loc[1:][batch.samples] - 1) // tiling.places))
    return StepWork(
        computed_tokens=computed,
        sampled_rows=int(np.count_nonzero(batch.samples)),
        context_tokens=read,
        attended_pairs=attended,
        moved_tokens=(len(moves.device_to_host) + len(moves.host_to_device)) * block_size,
        decode_rows=len(decoding),
        decode_context=read if decoding is context else decoding.sum().item(),
        longest_decode=decoding.max().item() if len(decoding) else 0,
        rows=num_rows,
        tiles=num_tiles,
        sampling_tiles=sampling,
        tile_context=positions,
    )


def steady_work(first: SteadyBatch, num_steps: int, tiling: Tiling | None = None, spans: Spans = ()) -> StepWork:
    """Return the work of so many steps with the same rows, a token each, of which `first` is the first. Amounts that rise with the contexts are columns,
    [steps], the others numbers."""
    known, sampled = first.seq_lens, first.num_samples
    rising = np.arange(num_steps)
    if spans:
        ends = known[:, None] + rising
        each = mean_read(spans, ends - 1, ends)
        context, longest_decode = each.sum(axis=0), each.max(axis=0, initial=0)
    else:
        context = int(known.sum()) + len(known) * rising.astype(np.float64)
        longest_decode = float(known.max(initial=0)) + rising
    num_tiles, sampling, positions = 0.0, 0.0, np.zeros(num_steps)
    if tiling is not None:
        longest = tiling.longest_contexts(known)
        num_tiles, sampling = float(len(longest)), float(-(-sampled // tiling.places))
        positions = tiling.whole_pieces(longest[:, None] + rising).sum(axis=0).astype(np.float64)
    return StepWork(
        computed_tokens=float(len(known)),
        sampled_rows=float(sampled),
        context_tokens=context,
        attended_pairs=context,
        decode_rows=float(len(known)),
        decode_context=context,
        longest_decode=longest_decode if len(known) else 0.0,
        rows=float(len(known)),
        tiles=num_tiles,
        sampling_tiles=sampling,
        tile_context=positions,
    )
