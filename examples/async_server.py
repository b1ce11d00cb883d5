"""A streaming server over TCP: many clients, several sequences a request, clients that hang up, a pool far too small.

A client sends a line of JSON and gets one for each token; when it hangs up, its request is aborted. A sequence that has
said STOP twice is ended by the server. main() holds every answer against the one that ample memory gives.
"""

import asyncio
import json
import time
from typing import Any

from embed import StandInEngine, conversations

from paged import BlockManager, Output, PagedError, Request, Scheduler

STOP = 7
Line = dict[str, Any]


class Server:
    def __init__(self, num_blocks: int, host_blocks: int = 12) -> None:
        self.engine = StandInEngine(num_blocks, 16, host_blocks)
        self.scheduler = Scheduler(BlockManager(num_blocks, 16, host_blocks=host_blocks), max_sequences=32)
        self.queues: dict[str, asyncio.Queue[Line | None]] = {}
        self.said: dict[tuple[str, int], list[int]] = {}
        self.has_work = asyncio.Event()

    async def run(self) -> None:
        while await self.has_work.wait():
            batch = self.scheduler.schedule(now=time.monotonic())
            self.engine.move(batch.moves)
            logits = self.engine.forward(
                batch.token_ids, batch.positions, batch.slot_mapping, batch.block_tables, batch.rows, batch.seq_lens
            )
            for output in self.scheduler.update(batch, self.engine.sample(logits[batch.samples]), now=time.monotonic()):
                if output.id in self.queues:
                    self.queues[output.id].put_nowait(self.line_of(output))
            if not self.scheduler.has_unfinished:
                self.has_work.clear()
            await asyncio.sleep(0)  # clients are heard between two steps, and in no other place

    def line_of(self, output: Output) -> Line:
        said = self.said.setdefault((output.id, output.sequence), [])
        said += output.token_ids
        reason = output.finish_reason
        if reason is None and said.count(STOP) == 2:
            self.scheduler.finish(output.id, output.sequence, reason := "stop")
        return {"sequence": output.sequence, "tokens": list(output.token_ids), "finish_reason": reason}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = Request(**json.loads(await reader.readline()))
        queue = self.queues[request.id] = asyncio.Queue[Line | None]()
        hung_up = asyncio.ensure_future(reader.read())
        hung_up.add_done_callback(lambda _: queue.put_nowait(None))
        num_open = request.num_sequences
        try:
            self.scheduler.add(request, now=time.monotonic())
            self.has_work.set()
            while num_open and not hung_up.done() and (line := await queue.get()) is not None:
                writer.write(json.dumps(line).encode() + b"\n")
                num_open -= line["finish_reason"] is not None
            if num_open:
                self.scheduler.abort(request.id)
        except PagedError as error:  # a request that never fits, or that had ended when its client hung up
            writer.write(json.dumps({"error": str(error)}).encode() + b"\n")
        del self.queues[request.id]
        hung_up.cancel()
        writer.close()


async def ask(port: int, request: Line, patience: int = 10_000) -> list[list[int]]:
    """A client: the tokens of each sequence, until it hears that all have ended, or has had so many lines."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(json.dumps(request).encode() + b"\n")
    lines = [json.loads(line) for _ in range(patience) if (line := await reader.readline())]
    writer.close()
    return [[token for line in lines if line["sequence"] == n for token in line["tokens"]] for n in range(2)]


async def answers_of(server: Server, requests: list[Line], patience: dict[int, int]) -> list[list[list[int]]]:
    listening, task = await asyncio.start_server(server.serve, "127.0.0.1", 0), asyncio.create_task(server.run())
    port = listening.sockets[0].getsockname()[1]
    answers = await asyncio.gather(*(ask(port, each, patience.get(n, 10_000)) for n, each in enumerate(requests)))
    while server.scheduler.has_unfinished:
        await asyncio.sleep(0.01)
    task.cancel()
    listening.close()
    assert server.scheduler.check() == []
    assert server.scheduler.manager.device.num_used == 0
    return answers


async def main() -> str:
    requests = [
        {"id": each.id, "prompt": each.prompt.tolist(), "max_tokens": each.max_tokens, "num_sequences": 1 + n % 2}
        for n, each in enumerate(conversations())
    ]
    pressed, patience = Server(num_blocks=48), {7: 3, 20: 1, 33: 5}
    ample = await answers_of(Server(num_blocks=4_000), requests, {})
    found = await answers_of(pressed, requests, patience)
    assert all(found[n] == ample[n] for n in range(len(requests)) if n not in patience), "memory changed an answer"
    stats = pressed.scheduler.stats()
    num_preempted = stats.preemptions_recompute + stats.preemptions_swap
    return f"{len(requests)} clients, {stats.aborted} hung up, {num_preempted} preemptions, no answer differs"


if __name__ == "__main__":
    print(asyncio.run(main()))
