#!/bin/bash
# cluster.sh NODES CMD...: run CMD in a Slurm cluster of so many nodes, all on this machine.
#
# Needs root and Debian's packages: apt-get install --no-install-recommends slurm-wlm munge
# All of it lives in namespaces of its own (mounts, processes): names of nodes are in an /etc/hosts
# that nobody else sees, and whatever happens no daemon outlives the command.
set -euo pipefail
nodes=$1
shift
if [ -z "${IN_CLUSTER:-}" ]; then
    IN_CLUSTER=$(mktemp -d)
    export IN_CLUSTER
    trap 'rm -rf "$IN_CLUSTER"' EXIT
    unshare --mount --pid --fork --kill-child --mount-proc "$0" "$nodes" "$@"
    exit
fi
folder=$IN_CLUSTER
mkdir "$folder/state"
chmod 755 "$folder"
{
    cat /etc/hosts
    for number in $(seq "$nodes"); do echo "127.0.0.1 trial$number"; done
} >"$folder/hosts"
mount --bind "$folder/hosts" /etc/hosts

head -c 128 /dev/urandom >"$folder/key"
chmod 400 "$folder/key"
munged --force --key-file "$folder/key" --socket "$folder/munge" \
    --pid-file "$folder/munged.pid" --log-file "$folder/munged.log" --seed-file "$folder/seed"

cat >"$folder/slurm.conf" <<CONF
ClusterName=trial
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmctldPort=26817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge
CryptoType=crypto/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool-%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
KillWait=5
NodeName=trial[1-$nodes] NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=[27001-$((27000 + nodes))] CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=60 State=UP
CONF
export SLURM_CONF=$folder/slurm.conf
for number in $(seq "$nodes"); do mkdir "$folder/spool-trial$number"; done
slurmctld
for number in $(seq "$nodes"); do slurmd -N "trial$number"; done
for _ in $(seq 60); do
    [ "$(sinfo --noheader --states=idle --format=%D)" = "$nodes" ] && break
    sleep 0.5
done
if [ "$(sinfo --noheader --states=idle --format=%D)" != "$nodes" ]; then
    echo "the cluster did not come up:" >&2
    sinfo >&2
    tail -n 20 "$folder"/*.log >&2
    exit 1
fi
"$@"
