"""The names under which our weight-transfer engines are known to vLLM."""

GLOO = "megatron_grpo_gloo"
NCCL = "megatron_grpo_nccl"
EXTENSION = "megatron_grpo.engines.vllm.receive.WorkerExtension"
