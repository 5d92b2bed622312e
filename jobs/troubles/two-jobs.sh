# Two jobs on a node want one port (EleutherAI/gpt-neox#768). Here no job names a port.
. "$(dirname "$0")/common.sh"
mpitrain launch -n 2 jobs/scripts/ddp.py &
mpitrain launch -n 2 jobs/scripts/ddp.py
wait $!
