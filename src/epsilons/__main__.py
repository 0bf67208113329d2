from epsilons.cli import main

main()
