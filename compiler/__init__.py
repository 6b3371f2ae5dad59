"""The compiler: IR, op table, pass infrastructure, lowering, memory planning, code generation and plan emission."""
