"""What several rooms measure and print with: clocks, processes, texts, tables; nothing that knows a model or an arm."""
