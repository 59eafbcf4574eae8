"""vLLM serves, livedraft learns beside it: what the target verified is tapped, a draft is trained on it, and each version that
passes the gate is swapped into every replica without a restart.

Inside vLLM's own interpreter run `worker_extension`, `tap`, `shipping`, `weights`, `sampling_guard` and `wire`: standard
library, torch, safetensors and `livedraft.records`, nothing else. All other files here are the parent's.
"""
