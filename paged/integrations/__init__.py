"""Other people's engines on our memory layer: one package for each, which needs that engine and brings none.

paged.integrations.vllm     a scheduler for vLLM: `vllm serve MODEL --scheduler-cls paged.integrations.vllm.Scheduler`
"""
