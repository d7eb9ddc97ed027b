"""What a model needs beside its weights: the files of `--tokenizer` (`files`), and the processor of its class (`processors`)."""
