"""What a model needs beside its weights.

`files` reads the files of `--tokenizer`, `contents` what they say of the model, `fits` compares it with the model, and `processors` has
the processor of each class.
"""
