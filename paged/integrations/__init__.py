"""Other people's engines on our memory layer, and our server on their clusters: one package for each, which needs theirs and brings none.

paged.integrations.vllm     a scheduler for vLLM: `vllm serve MODEL --scheduler-cls paged.integrations.vllm.Scheduler`
paged.integrations.ray      replicas of our server on Ray Serve: `paged serve --replicas 2`
"""
