"""Expert distribution recorder: choices counted per MoE layer, kept per pass, summed over ranks, dumped to files.

File formats are SGLang's `expert_distribution_recorder_*.pt`.

Legend: L layers (all of the model; dense ones stay zero), E logical experts, P physical experts, G expert-parallel
ranks, T tokens, K experts per token, S passes.
"""
