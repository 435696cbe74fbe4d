"""GBNF, the grammar language of llama.cpp, translated to Lark."""
