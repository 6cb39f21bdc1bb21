"""Between text and tokens: tokenizers, chat templates, grammars."""
