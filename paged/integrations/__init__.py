"""Other engines on our memory layer, and our server on Ray clusters. Each package needs the other project, and does not install it.

paged.integrations.vllm          a scheduler for vLLM: `vllm serve MODEL --scheduler-cls paged.integrations.vllm.Scheduler`
paged.integrations.transformers  a scheduler for transformers' continuous batching: `install(manager)`
paged.integrations.ray           replicas of our server on Ray Serve: `paged serve --replicas 2`
"""
