"""Which experts the tokens chose: counted in every MoE layer, kept over passes, summed over ranks, written to files.

File formats are SGLang's: what reads its `expert_distribution_recorder_*.pt` reads these.

Legend: L layers (all of the model; dense ones stay zero), E logical experts, P physical experts, G expert-parallel
ranks, T tokens, K experts per token, S passes.
"""
