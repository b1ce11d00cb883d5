"""The text above each plot: a heading, and how to read the plot."""

from paged.study.report.over_time import NUM_LINE_POINTS, NUM_POINTS
from paged.study.report.roof import NUM_STEPS


def _averaged(num_points: int) -> str:
    return f"A longer timeline is shown as {num_points:,} averages over equal times, weighted by time; shorter peaks are flattened."


SECTIONS = (
    (
        "load",
        "Throughput against latency",
        "How many tokens a second each policy writes, and how long its slowest requests wait. Lower right is better. A line joins the loads of one policy, lightest first; whiskers are the smallest and largest of several seeds.",
    ),
    (
        "memory",
        "KV memory over time",
        "What the pool's slots hold as time goes by, of one policy. Tokens: slots whose K and V are computed. Fragmentation: held, not filled. Promised: kept by the policy for sequences beyond what they hold. "
        f"Cached: content that no request holds, for prefix hits; evicted when needed. {_averaged(NUM_POINTS)}",
    ),
    (
        "occupancy",
        "Occupancy over time",
        f"What share of memory, rows and token budget each policy uses as time goes by. {_averaged(NUM_LINE_POINTS)}",
    ),
    (
        "queues",
        "Queues over time",
        f"How many requests run, wait and stand aside, of those that have arrived and have not ended. {_averaged(NUM_LINE_POINTS)}",
    ),
    (
        "preemptions",
        "Preemptions and waste",
        "What each policy takes back for want of memory, and what that costs. First: how often a running request gave blocks back; solid by recompute, hatched by swap. Second: tokens computed again (solid), "
        "swapped out (hatched) and swapped in (crossed), and their share of all computed tokens.",
    ),
    (
        "distributions",
        "Distributions",
        "How many seconds requests took: the share that had at most so many. Requests that were rejected, or have no second token, are not in them.",
    ),
    (
        "roofline",
        "Roofline",
        f"How much of the device steps reach: at most {NUM_STEPS} of each policy, evenly picked. Operations and bytes are what a step's time was made of; "
        "that time has the host's share in it. Left of the corner the device waits for memory, right of it for arithmetic.",
    ),
    (
        "cost",
        "Cost",
        "What a million output tokens cost: the price of the whole makespan, idle time included, for each million output tokens.",
    ),
)
"""(id, heading, text) in the order of the page."""
